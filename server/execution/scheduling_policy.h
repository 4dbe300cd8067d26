// Which job runs next, and for how long.
#ifndef RAPT_SERVER_EXECUTION_SCHEDULING_POLICY_H_
#define RAPT_SERVER_EXECUTION_SCHEDULING_POLICY_H_

#include <chrono>
#include <cstdint>
#include <map>
#include <set>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "base/clock.h"
#include "server/execution/job.h"
#include "server/queue_state.h"

namespace rapt {

// Orders jobs by virtual time, the compute time that each has received. The job with the least
// virtual time runs next, for at most kQuantum before the next decision, so that a short job
// overtakes a long one. A new job starts at the current virtual time, equal to the running jobs.
//
// Priority. A job's rank is its virtual time minus a head start of kPriorityStep for each level by
// which it is more urgent than kDefaultPriority; a less urgent job starts behind by the same step.
// Therefore a job precedes every less urgent one that has not waited long. Waiting jobs age:
// virtual time advances while others compute, by the fair share of each job in flight. A job runs
// at the latest when the jobs in flight have each received the difference of the head starts, on
// average. In the long run all jobs receive the same share of the time, whatever their priority.
//
// Interruption. At a checkpoint of a long task, the first job in the order whose tasks are much
// shorter runs before the task continues.
//
// Batching. Waiting single-task jobs of one group are taken as a batch, in the order above, up to
// the capacity of a run.
//
// Has no threads and no lock: not thread-safe. Does not own its jobs: each must stay alive from
// Add() to Remove().
class SchedulingPolicy {
 public:
  static constexpr std::chrono::milliseconds kQuantum{2};
  // Ten quanta: longer than most requests compute, so that one level is enough to go first.
  static constexpr std::chrono::milliseconds kPriorityStep{20};
  // An interrupting job's tasks are shorter by this factor than the task that it interrupts.
  // Therefore it delays that task little, interruptions nest to a small depth, and no job
  // interrupts itself.
  static constexpr double kMuchLonger = 4;
  // A batch is closed after this number of jobs that did not fit: the cost of a decision is
  // proportional to the size of the batch, not of the queue.
  static constexpr int kMaxSkipped = 16;

  // A job as the policy sees it.
  struct Entry {
    Entry(Job job, Instant submitted);

    Job job;
    const Instant submitted;
    Instant started = Instant::max();  // when first taken

   private:
    friend class SchedulingPolicy;
    bool is_waiting() const { return started == Instant::max(); }
    std::chrono::nanoseconds rank() const { return virtual_time - head_start; }

    const std::chrono::nanoseconds head_start;
    std::chrono::nanoseconds virtual_time{0};
    uint64_t sequence = 0;  // of submission; breaks ties
  };
  using Entries = absl::InlinedVector<Entry*, 4>;

  // The clock outlives the policy.
  explicit SchedulingPolicy(const Clock& clock) : clock_(clock) {}

  // Adds a new job, which can be taken from now on.
  void Add(Entry* entry);
  // Call when all tasks of the job have been handed out. It is not taken until Resume().
  void Pause(Entry* entry) { runnable_.erase(entry); }
  // Call when the job has tasks again.
  void Resume(Entry* entry) { runnable_.insert(entry); }
  // Call when the job has ended. REQUIRES: paused.
  void Remove(const Entry* /*entry*/) { --jobs_; }

  // Returns true if no job can be taken.
  bool empty() const { return runnable_.empty(); }

  // Returns the next job. With `may_batch`, also returns the waiting jobs of its group that are
  // alive and fit into the same run. The jobs of a batch are paused; a single one can be taken
  // again by other threads. REQUIRES: !empty().
  Entries Take(bool may_batch, absl::FunctionRef<bool(const Entry&)> is_alive);
  // Returns the job that interrupts a task of `running`, or null.
  Entry* TakeInterrupting(const Entry& running);

  // Charges a job for the compute time that a thread has spent on it since `begin`.
  void Charge(Entry* entry, Instant begin);
  // The same for a batch. Its jobs are not charged individually, because each has a single task.
  void ChargeBatch(Instant begin) { Advance(clock_.Now() - begin); }

  // Returns the jobs that were never taken.
  QueueState waiting() const;

 private:
  struct Before {
    bool operator()(const Entry* a, const Entry* b) const;
  };
  using Queue = std::set<Entry*, Before>;

  Entries ChooseBatch(Entry* first, absl::FunctionRef<bool(const Entry&)> is_alive) const;
  void Start(Entry* entry);
  void Advance(std::chrono::nanoseconds used);

  const Clock& clock_;
  Queue runnable_;                       // jobs with tasks to hand out
  std::map<std::string, Queue> groups_;  // by name, the waiting jobs that have a group
  int64_t jobs_ = 0;                     // added and not removed
  std::chrono::nanoseconds virtual_now_{0};
  uint64_t next_sequence_ = 0;
};

}  // namespace rapt

#endif  // RAPT_SERVER_EXECUTION_SCHEDULING_POLICY_H_
