// Search for the highest rate that meets an objective.
#ifndef RAPT_CLIENT_LOAD_SEARCH_H_
#define RAPT_CLIENT_LOAD_SEARCH_H_

#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "client/load/result.h"

namespace rapt::load {

// Bisects between a rate that passes and one that fails until they differ by less than `precision`.
// `capacity` is the throughput of the server in a closed loop: no rate much above it can pass.
// `try_rate` offers a rate and returns whether it passed. Returns the trials in order. None passes
// if even a hundredth of the capacity fails.
absl::StatusOr<std::vector<Trial>> SearchRate(
    double capacity, double precision,
    absl::FunctionRef<absl::StatusOr<Trial>(double rate)> try_rate);

// Returns the trial with the highest offered rate that passed, or nullptr.
const Trial* BestOf(const std::vector<Trial>& trials);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_SEARCH_H_
