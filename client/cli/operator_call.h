// The inputs of an operator, read from files, and its computation in this process.
#ifndef RAPT_CLIENT_CLI_OPERATOR_CALL_H_
#define RAPT_CLIENT_CLI_OPERATOR_CALL_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "attention/bound_call.h"
#include "attention/tensor_operator.h"
#include "base/thread_pool.h"
#include "client/cli/attend_files.h"
#include "rapt/tensor.h"

namespace rapt {

struct OperatorInputs {
  InputMap<std::optional<LoadedTensor>> tensors;
  std::vector<int64_t> key_lengths;  // empty: none

  // Refer to this object.
  std::optional<client::TensorView> View(Slot slot) const;
  Arguments ToArguments() const;

  InputMap<std::optional<TensorSpec>> Specs() const;
};

struct InputFile {
  Slot slot;
  const char* name;
  std::optional<std::string> path;  // absent: the call has no such input
  DType usual = DType::kFloat32;    // as in LoadTensor()
};

// InvalidArgument or NotFound names the file or the input.
absl::StatusOr<OperatorInputs> LoadInputs(const std::vector<InputFile>& files,
                                          const std::optional<std::string>& key_lengths,
                                          const std::string& dtype);

struct OperatorResult {
  OutputMap<std::optional<client::Tensor>> outputs;
  std::string backend, plan;  // empty: nothing was to be computed
  std::chrono::microseconds compute_time{0};
};

// Computes on the pool's threads. REQUIRES: each input has the size of its shape.
absl::StatusOr<OperatorResult> RunHere(const BoundCall& call, const Arguments& inputs,
                                       ThreadPool& pool);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_OPERATOR_CALL_H_
