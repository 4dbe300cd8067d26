// How a problem will be computed: which backend, which tiles, how many tasks, how many bytes.
#ifndef RAPT_ATTENTION_PLAN_H_
#define RAPT_ATTENTION_PLAN_H_

#include <algorithm>
#include <cstdint>
#include <string>

#include "absl/container/inlined_vector.h"
#include "attention/present.h"
#include "attention/problem.h"
#include "attention/routing.h"

namespace rapt {

class BackendSet;

// The backends that need no device: the CPU's and the reference.
const BackendSet& BuiltInBackends();

struct PlanOptions {
  std::string backend =
      "auto";  // auto, or a backend's name: the first of the list that supports the problem
  std::string isa = "auto";  // auto, or an instruction set's name: the best one this machine has
  int threads = 1;           // that will run the tasks; tiles and key splits may depend on it
  // Whether tasks that wait for a device get threads of their own, see Backend::lanes(). Where not,
  // backends with such tasks are not taken.
  bool has_lanes = false;
  const BackendSet* backends = &BuiltInBackends();  // to choose from
};

// The steps between queries and keys that a backend works in. What they mean is the backend's own.
struct Tiles {
  int64_t query_block = 0;  // rows of Q that a task holds
  int64_t key_block = 0;    // keys that one step folds in
  int64_t key_splits = 1;   // parts of the keys that run at once and are merged by LSE
};

// A function of problem and options alone, never of load, except for Backend::Prefers() of a
// device. The same plan gives the same bits, except in a batched run, which may round differently.
// Immutable after MakePlan; may be shared by threads.
struct Plan {
  Problem problem;
  Routing routing;
  std::string isa;  // empty where the backend has none
  int threads = 1;
  Tiles tiles;

  // Tasks of one stage are independent and may run in any order on any worker; a stage starts when
  // the one before it is done. Empty when there is nothing to compute.
  absl::InlinedVector<int64_t, 3> stages;

  // The whole workspace that Run needs, to the byte: what all tasks share, then one part a worker.
  int64_t shared_workspace_bytes = 0;
  int64_t worker_workspace_bytes = 0;
  int64_t workspace_bytes() const {
    return shared_workspace_bytes + threads * worker_workspace_bytes;
  }

  // Plans of one backend and batch group, each of a single task, may be computed by one run, see
  // Backend::RunBatch(). Empty: this plan is never batched.
  std::string batch_group;
  // Fraction of a batch's capacity. The costs of a batch add up to at most 1.
  double batch_cost = 1;

  // The type of Arguments::State where the problem folds.
  DType state_dtype = DType::kFloat32;

  // Multiply-adds count as two. Keys that causality or window hide are not counted.
  double flops = 0;
  // Of a task of the first stage that does not copy alone, about.
  double task_flops() const {
    if (stages.empty()) return 0;
    return flops / static_cast<double>(std::max<int64_t>(stages[0] - PresentTasks(problem), 1));
  }

  // "cpu/avx512 q96 k64 s1", for logs, metadata and people.
  std::string Describe() const;
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_PLAN_H_
