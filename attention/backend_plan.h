// The part of a plan that only its backend understands.
#ifndef RAPT_ATTENTION_BACKEND_PLAN_H_
#define RAPT_ATTENTION_BACKEND_PLAN_H_

#include <string>

namespace rapt {

// Single-task plans of one backend with equal keys may be computed by one Backend::RunBatch().
struct BatchGroup {
  std::string key;
  double cost = 1;  // fraction of a run's capacity; the members of a run add up to at most 1
};

// Immutable once the plan is made; may be shared by plans and threads.
class BackendPlan {
 public:
  virtual ~BackendPlan() = default;

  // Returns what Plan::Describe() appends, such as "q96 k64 s1"; may be empty.
  virtual std::string Describe() const { return ""; }

  // Null: the plan runs alone.
  virtual const BatchGroup* batch_group() const { return nullptr; }
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_BACKEND_PLAN_H_
