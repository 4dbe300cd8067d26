// Operators other than attention.
#ifndef RAPT_ATTENTION_TENSOR_OPERATOR_H_
#define RAPT_ATTENTION_TENSOR_OPERATOR_H_

#include <cstddef>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "attention/checkpoint.h"
#include "attention/operator.h"
#include "attention/plan.h"
#include "attention/problem.h"

namespace rapt {

// A valid call: its shapes and attributes. Immutable; may be shared by threads. MakePlan() and
// Run() of attention.h compute it.
//
// The header of each operator says in which slots its tensors are. Inputs and outputs are row-major
// in Arguments, of which only `data` and `key_lengths` are read.
class TensorOperator {
 public:
  virtual ~TensorOperator() = default;

  // The outputs that the call has.
  virtual const OutputMap<std::optional<TensorSpec>>& outputs() const = 0;

  // Returns whether CheckData() reads an input.
  virtual bool checks_data() const { return false; }
  // Returns InvalidArgument for values that are not allowed.
  virtual absl::Status CheckData(const Arguments& /*arguments*/) const { return absl::OkStatus(); }

  // The inputs that decide what is read or computed. They are copied out of shared memory, where
  // the caller may change them at any time.
  virtual SlotSet copied_inputs() const { return {}; }

  // Returns whether a device's backend computes the operator, as Backend::Supports() does; nullopt
  // if this device has no form of it.
  virtual std::optional<absl::Status> SupportedBy(const Backend& /*device*/) const {
    return std::nullopt;
  }
  // As Backend::Prefers() and Prepare(). REQUIRES: the device supports the operator.
  virtual absl::Status PreferredBy(const Backend& /*device*/) const { return absl::OkStatus(); }
  virtual void PrepareOn(const Backend& /*device*/) const {}

  // Fills stages, workspace and flops of a plan whose backend, isa and threads are set.
  virtual void PlanTasks(Plan& plan) const = 0;

  // As Backend::RunTask(). REQUIRES: the data has been checked.
  virtual void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace,
                       int stage, int64_t task, int worker, const Checkpoint& checkpoint) const = 0;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_TENSOR_OPERATOR_H_
