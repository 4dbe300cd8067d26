// The plan of a problem: its backend, tasks and workspace.
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
#include "attention/tensor_view.h"

namespace rapt {

class BackendSet;

// The backends that need no device: CPU and reference.
const BackendSet& BuiltInBackends();

struct PlanOptions {
  // A backend's name, or "auto": the first in the list that supports the problem.
  std::string backend = "auto";
  // An instruction set's name, or "auto": the best that this machine supports.
  std::string isa = "auto";
  int threads = 1;  // number of threads that run the tasks; tiles and key splits may depend on it
  // Whether tasks that wait for a device run on dedicated threads, see Backend::lanes(). If not,
  // backends with such tasks are not chosen.
  bool has_lanes = false;
  const BackendSet* backends = &BuiltInBackends();  // to choose from
  // The last of the sources that the inputs of Run() will have. Backends that do not read it are
  // not chosen.
  Source source = Source::kStrided;
};

// Of the workspace and its parts.
inline constexpr int64_t kWorkspaceAlignment = 64;

// Depends only on problem and options, never on load, except for Backend::Prefers() of a device.
// The same plan gives the same bits, except in a joined run, which may round differently.
// Immutable after MakePlan; may be shared by threads. Cheap to copy.
struct Plan {
  Problem problem;
  Routing routing;
  std::string isa;  // empty if the backend has none
  int threads = 1;

  // The number of tasks of each stage. Tasks of one stage are independent and may run in any order
  // on any worker; a stage starts when the previous one is done. Empty: nothing to compute.
  absl::InlinedVector<int64_t, 3> stages;
  // The stage that begins with the copy tasks of the present outputs, if there are any.
  int present_stage = 0;

  // The exact workspace that Run() needs: the shared part, then one part per worker.
  int64_t shared_workspace_bytes = 0;
  int64_t worker_workspace_bytes = 0;
  int64_t workspace_bytes() const {
    return shared_workspace_bytes + threads * worker_workspace_bytes;
  }

  // The type of Arguments::State if the problem folds.
  DType state_dtype = DType::kFloat32;

  // A multiply-add counts as two. Keys hidden by causality or window are not counted.
  double flops = 0;
  // Returns the approximate flops of one task of the stage with most tasks, not counting copy
  // tasks.
  double task_flops() const {
    if (stages.empty()) return 0;
    int64_t most = 1;
    for (size_t n = 0; n < stages.size(); ++n) {
      const int64_t copies = static_cast<int>(n) == present_stage ? PresentTasks(problem) : 0;
      most = std::max(most, stages[n] - copies);
    }
    return flops / static_cast<double>(most);
  }

  // Null if the backend needs no further details.
  std::shared_ptr<const BackendPlan> backend_plan;
  const BatchGroup* batch_group() const {
    return backend_plan == nullptr ? nullptr : backend_plan->batch_group();
  }

  // Returns "cpu/avx512 q96 k64 s1", for logs and metadata.
  std::string Describe() const;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_PLAN_H_
