#include "client/cli/local_operator.h"

#include <utility>

#include "attention/attention.h"
#include "base/aligned_buffer.h"
#include "base/host_limits.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"

namespace rapt {

absl::StatusOr<OperatorResult> RunHere(const BoundCall& call, const Arguments& inputs) {
  Arguments arguments = inputs;
  OutputMap<std::string> bytes;
  for (Role role : kAllOutputs) {
    const std::optional<TensorSpec>& spec = call.outputs()[role];
    if (!spec) continue;
    RAPT_ASSIGN_OR_RETURN(const int64_t size, ByteSize("output", *spec));
    bytes[role].resize(static_cast<size_t>(size));
    arguments.outputs[role].data = reinterpret_cast<std::byte*>(bytes[role].data());
  }
  ThreadPool pool(ReadHostLimits().cores);
  RAPT_ASSIGN_OR_RETURN(const Plan plan, call.MakePlan({.threads = pool.workers()}));
  AlignedBuffer workspace(plan.workspace_bytes());
  RAPT_RETURN_IF_ERROR(call.Run(plan, arguments, workspace.span(), pool));
  OperatorResult result{
      .outputs = {}, .backend = std::string(plan.routing.backend->name()), .plan = plan.Describe()};
  for (Role role : kAllOutputs) {
    const std::optional<TensorSpec>& spec = call.outputs()[role];
    if (!spec) continue;
    result.outputs[role].emplace(spec->dtype, spec->shape, std::move(bytes[role]));
  }
  return result;
}

}  // namespace rapt
