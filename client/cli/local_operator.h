// Operators, computed in this process.
#ifndef RAPT_CLIENT_CLI_LOCAL_OPERATOR_H_
#define RAPT_CLIENT_CLI_LOCAL_OPERATOR_H_

#include <optional>
#include <string>

#include "absl/status/statusor.h"
#include "attention/bound_call.h"
#include "rapt/tensor.h"

namespace rapt {

struct OperatorResult {
  OutputMap<std::optional<client::Tensor>> outputs;
  std::string backend, plan;
};

// Computes on all cores. REQUIRES: each input has the size of its shape.
absl::StatusOr<OperatorResult> RunHere(const BoundCall& call, const Arguments& inputs);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LOCAL_OPERATOR_H_
