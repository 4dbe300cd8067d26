// A unit of work for the executor, and the report of how it ended.
#ifndef RAPT_SERVER_EXECUTION_JOB_H_
#define RAPT_SERVER_EXECUTION_JOB_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/checkpoint.h"
#include "base/clock.h"

namespace rapt {

struct JobReport {
  // DeadlineExceeded or Cancelled if the job was abandoned between two tasks or at a checkpoint,
  // Unavailable if the executor was destroyed first.
  absl::Status status;
  std::chrono::nanoseconds queue_time{0};    // until a thread started it
  std::chrono::nanoseconds compute_time{0};  // from then on
  int64_t batch_size = 1;                    // jobs computed by the same run, including this one
};

// One job of a batch.
struct BatchMember {
  void* job = nullptr;  // JobBatchGroup::member
  bool done = false;    // set by run_batch; a member that is not done runs alone later
};

// Batching group of a single-task job: jobs of the same group may be computed by one run.
struct JobBatchGroup {
  std::string name;  // empty: the job runs alone
  // Fraction of a run's capacity that this job takes. The members of a batch take at most 1.
  double batch_cost = 1;
  // Runs the tasks of at least two jobs instead of their run_task; may skip some of them. The same
  // function for all jobs of a group.
  void (*run_batch)(absl::Span<BatchMember> members, int worker) = nullptr;
  void* member = nullptr;  // identifies this job to run_batch
};

// Work divided into tasks, such as a plan.
struct Job {
  // Number of tasks of each stage. The tasks of one stage are independent and may run in any order;
  // a stage starts when the previous one has ended.
  absl::InlinedVector<int64_t, 3> stages;
  // Called from several threads concurrently, never after done. `worker` is in [0, threads()) and
  // differs between concurrent calls.
  absl::AnyInvocable<void(int stage, int64_t task, int worker, const Checkpoint& checkpoint) const>
      run_task;
  // Approximate cost of the longest task, in the same unit for all jobs. At a checkpoint, a job
  // interrupts only tasks that are much longer than its own.
  double task_cost = std::numeric_limits<double>::infinity();
  uint64_t priority = 0;  // Request::priority
  JobBatchGroup batch_group;
  Instant deadline = Instant::max();
  const std::atomic<bool>* cancelled = nullptr;  // null: never
  absl::AnyInvocable<void(const JobReport&)> done;
};

}  // namespace rapt

#endif  // RAPT_SERVER_EXECUTION_JOB_H_
