#include "attention/bound_call.h"

#include <utility>

namespace rapt {

BoundCall::BoundCall(ResolvedCall attention) : attention_(std::move(attention)) {
  for (Role role : OutputsOf(attention_->problem)) outputs_[role] = attention_->outputs[role];
}

absl::StatusOr<Plan> BoundCall::MakePlan(const PlanOptions& options) const {
  return attention_ ? rapt::MakePlan(attention_->problem, options)
                    : rapt::MakePlan(*operator_, options);
}

absl::Status BoundCall::Run(const Plan& plan, const Arguments& arguments,
                            absl::Span<std::byte> workspace, ThreadPool& pool) const {
  if (!attention_) return rapt::Run(*operator_, plan, arguments, workspace, pool);
  return rapt::Run(plan, ViewsOf(arguments), workspace, pool);
}

// The views of attention's tensors.
Arguments BoundCall::ViewsOf(const Arguments& arguments) const {
  Arguments views;
  for (Role role : InputTensorsOf(attention_->problem)) {
    views.inputs[role] = attention_->Input(role, arguments.inputs[role].data);
  }
  for (Role role : OutputsOf(attention_->problem)) {
    views.outputs[role] = attention_->Output(role, arguments.outputs[role].data);
  }
  views.key_lengths = arguments.key_lengths;
  return views;
}

}  // namespace rapt
