// Ragged attention on a device that keeps copies of pages.
#ifndef RAPT_ATTENTION_MECHANISM_SOFTMAX_RAGGED_DEVICE_H_
#define RAPT_ATTENTION_MECHANISM_SOFTMAX_RAGGED_DEVICE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "attention/checkpoint.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "attention/plan.h"
#include "attention/problem.h"

namespace rapt {

// Thread-safe. Rounding may depend on the other items of a call.
class RaggedDevice {
 public:
  virtual ~RaggedDevice() = default;

  // As Backend::Supports(), Prefers() and Prepare().
  virtual absl::Status Supports(const RaggedCall& call) const = 0;
  virtual absl::Status Prefers(const RaggedCall& call) const = 0;
  virtual void Prepare(const RaggedCall& call) const = 0;

  // As TensorOperator::PlanTasks(): fills stages, workspace, flops and backend_plan. REQUIRES: the
  // call is supported; it and `source` outlive the plan.
  virtual void PlanTasks(const RaggedCall& call, const RaggedSource& source, Plan& plan) const = 0;
  // As TensorOperator::RunTask(), for a plan of this device; it has one stage.
  virtual void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace,
                       int64_t task, int worker, const Checkpoint& checkpoint) const = 0;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_SOFTMAX_RAGGED_DEVICE_H_
