// How a problem will be computed: by which backend, in how many tasks, with how much workspace.
#ifndef RAPT_ATTENTION_PLAN_H_
#define RAPT_ATTENTION_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/container/inlined_vector.h"
#include "attention/backend_plan.h"
#include "attention/present.h"
#include "attention/problem.h"
#include "attention/routing.h"

namespace rapt {

class BackendSet;

// The backends that need no device: the CPU's and the reference.
const BackendSet& BuiltInBackends();

struct PlanOptions {
  // A backend's name, or "auto": the first one of the list that supports the problem.
  std::string backend = "auto";
  // An instruction set's name, or "auto": the best one of this machine.
  std::string isa = "auto";
  int threads = 1;  // number of threads that run the tasks; tiles and key splits may depend on it
  // Whether tasks that wait for a device get threads of their own, see Backend::lanes(). Without
  // them, backends that have such tasks are not chosen.
  bool has_lanes = false;
  const BackendSet* backends = &BuiltInBackends();  // to choose from
};

// A function of problem and options alone, never of load, except for Backend::Prefers() of a
// device. The same plan gives the same bits, except in a joined run, which may round differently.
// Immutable after MakePlan; may be shared by threads. Cheap to copy.
struct Plan {
  Problem problem;
  Routing routing;
  std::string isa;  // empty if the backend has none
  int threads = 1;

  // The number of tasks of each stage. Tasks of one stage are independent and may run in any order
  // on any worker; a stage starts when the previous one is done. Empty: nothing to compute.
  absl::InlinedVector<int64_t, 3> stages;

  // The workspace that Run needs, to the byte: the shared part, then one part per worker.
  int64_t shared_workspace_bytes = 0;
  int64_t worker_workspace_bytes = 0;
  int64_t workspace_bytes() const {
    return shared_workspace_bytes + threads * worker_workspace_bytes;
  }

  // The type of Arguments::State if the problem folds.
  DType state_dtype = DType::kFloat32;

  // A multiply-add counts as two. Keys hidden by causality or window are not counted.
  double flops = 0;
  // Approximate flops of one task of the first stage, copy tasks excluded.
  double task_flops() const {
    if (stages.empty()) return 0;
    return flops / static_cast<double>(std::max<int64_t>(stages[0] - PresentTasks(problem), 1));
  }

  // Null if the backend needs no more than the above.
  std::shared_ptr<const BackendPlan> backend_plan;
  const BatchGroup* batch_group() const {
    return backend_plan == nullptr ? nullptr : backend_plan->batch_group();
  }

  // "cpu/avx512 q96 k64 s1", for logs, metadata and people.
  std::string Describe() const;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_PLAN_H_
