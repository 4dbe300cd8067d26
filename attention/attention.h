// rapt_attention: exact attention, without gRPC, protobuf or metrics.
//
//     Problem problem{.batch = 2, .query_heads = 32, .kv_heads = 8, ...};
//     absl::StatusOr<Plan> plan = MakePlan(problem, {.threads = 8});
//     AlignedBuffer workspace(plan->workspace_bytes());
//     absl::Status status = Run(*plan, arguments, workspace.span(), pool);
//
// Keys and values are read in place: strided, in the slices of a message, or in pages. A page is a
// block of memory with a fixed number of rows (tensor_view.h). If rows have to be copied, only one
// block of them is copied at a time.
#ifndef RAPT_ATTENTION_ATTENTION_H_
#define RAPT_ATTENTION_ATTENTION_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/backend.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "attention/tensor_operator.h"
#include "base/thread_pool.h"

namespace rapt {

// Returns InvalidArgument for an invalid problem or an unknown backend or instruction set,
// FailedPrecondition if the named one is not available here, Unimplemented, with the reason, if the
// named backend does not support the problem. Allocates little and computes nothing.
absl::StatusOr<Plan> MakePlan(const Problem& problem, const PlanOptions& options);

// Returns the error that MakePlan() returns for every problem under these options, or OK. For
// startup.
absl::Status Validate(const PlanOptions& options);

// Returns the name of the instruction set that plans of this backend use under --isa=`wanted`;
// empty for a backend without a choice of them. REQUIRES: `wanted` is valid.
std::string ChooseIsa(const Backend& backend, absl::string_view wanted);

// Computes the plan. Blocks until done. `workspace` has at least plan.workspace_bytes() bytes,
// aligned to 64; Run allocates no memory that grows with the problem. `pool` has at most
// plan.threads workers. Safe to call from several threads with different workspaces and outputs.
absl::Status Run(const Plan& plan, const Arguments& arguments, absl::Span<std::byte> workspace,
                 ThreadPool& pool);

// The same for another operator. A device's backend computes it if the device has a form of it,
// supports it, and is named or preferred; otherwise the CPU does: by the backend that the options
// name, if that is not a device's.
absl::StatusOr<Plan> MakePlan(const TensorOperator& op, const PlanOptions& options);
absl::Status Run(const TensorOperator& op, const Plan& plan, const Arguments& arguments,
                 absl::Span<std::byte> workspace, ThreadPool& pool);

}  // namespace rapt

#endif  // RAPT_ATTENTION_ATTENTION_H_
