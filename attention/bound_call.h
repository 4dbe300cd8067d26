// Valid calls of any operator.
#ifndef RAPT_ATTENTION_BOUND_CALL_H_
#define RAPT_ATTENTION_BOUND_CALL_H_

#include <cstddef>
#include <memory>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/attention.h"
#include "attention/operator.h"
#include "attention/tensor_operator.h"

namespace rapt {

// A call whose shapes and attributes are checked. Immutable; may be shared by threads.
class BoundCall {
 public:
  // Of attention or its backward pass.
  explicit BoundCall(ResolvedCall attention);
  // Of another operator.
  explicit BoundCall(std::shared_ptr<const TensorOperator> op) : operator_(std::move(op)) {}

  // The outputs that the call has.
  const OutputMap<std::optional<TensorSpec>>& outputs() const {
    return operator_ == nullptr ? outputs_ : operator_->outputs();
  }

  // Null unless it is of another operator.
  const std::shared_ptr<const TensorOperator>& tensor_operator() const { return operator_; }

  // As those of attention.h. Tensors are row-major in Arguments, of which only `data` and
  // `key_lengths` are read.
  absl::StatusOr<Plan> MakePlan(const PlanOptions& options) const;
  absl::Status Run(const Plan& plan, const Arguments& arguments, absl::Span<std::byte> workspace,
                   ThreadPool& pool) const;

 private:
  Arguments ViewsOf(const Arguments& arguments) const;

  std::optional<ResolvedCall> attention_;  // else:
  std::shared_ptr<const TensorOperator> operator_;
  OutputMap<std::optional<TensorSpec>> outputs_;  // of attention
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_BOUND_CALL_H_
