// EstimateMemory in this process.
#ifndef RAPT_CLIENT_CLI_LOCAL_MEMORY_H_
#define RAPT_CLIENT_CLI_LOCAL_MEMORY_H_

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "rapt/reports.h"

namespace rapt {

// The lengths from 128 to 32768 at which algorithms are compared.
std::vector<int64_t> DoubledLengths();

// Uses the plans for this machine. Returns InvalidArgument as a server does.
absl::StatusOr<client::MemoryEstimates> EstimateMemoryHere(const client::MemoryQuestion& question);
// `model` is a folder.
absl::StatusOr<client::MemoryEstimates> EstimateMemoryHere(
    const client::LayerMemoryQuestion& question);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LOCAL_MEMORY_H_
