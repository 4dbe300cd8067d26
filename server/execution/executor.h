// The compute threads that all requests share.
#ifndef RAPT_SERVER_EXECUTION_EXECUTOR_H_
#define RAPT_SERVER_EXECUTION_EXECUTOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "base/clock.h"
#include "base/metric_sink.h"
#include "base/mutex.h"
#include "server/execution/job.h"
#include "server/execution/scheduling_policy.h"
#include "server/queue_state.h"

namespace rapt {

// Runs the tasks of many jobs on a fixed number of threads, in the order of SchedulingPolicy. Load
// affects when a task runs, never what it computes. Deadline and cancellation are checked
// between tasks and at checkpoints.
//
// Batches form only while no other thread is free. Therefore a job never waits for others to join
// it and never shares a thread while another is idle. The run of a batch is not interrupted.
//
// Thread-safe. A job's done runs exactly once, after its last task and outside any lock.
// Destruction abandons the jobs in flight and returns when their `done` callbacks have run.
class Executor {
 public:
  static constexpr std::chrono::milliseconds kQuantum = SchedulingPolicy::kQuantum;

  Executor(int threads, const Clock& clock);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  int threads() const { return thread_count_; }
  // Returns the number of threads that are running tasks.
  int busy_threads() const { return busy_threads_.load(std::memory_order_relaxed); }
  // Returns the time that compute threads have spent running tasks, added up over all threads.
  std::chrono::nanoseconds busy_time() const {
    return std::chrono::nanoseconds(busy_ns_.load(std::memory_order_relaxed));
  }
  // Returns the number of tasks completed by compute threads since the start.
  int64_t ended_tasks() const { return ended_tasks_.load(std::memory_order_relaxed); }
  // Returns the jobs that no thread has started yet.
  QueueState waiting() const;
  // Exports these as metrics of the compute threads.
  void ExportTo(MetricSink& sink) const;

  // Returns at once; `done` runs on a compute thread.
  void Submit(Job job);

  // Runs the job and its `done` on the calling thread as worker 0. For jobs that cost less than a
  // thread switch.
  void RunInline(Job job);

 private:
  // A job in flight. next_task hands out the tasks of one stage, which has ended when all of them
  // are handed out and no worker runs one. The last worker to leave the last stage deletes it.
  struct ActiveJob : SchedulingPolicy::Entry {
    ActiveJob(Job job, Instant submitted);

    int stage = 0;
    int64_t tasks = 0;  // of the stage
    std::atomic<int64_t> next_task{0};
    int workers = 0;  // in the stage now
    absl::Status status;
  };

  // The time that a worker spends on a job: a quantum, plus the rest of its last task.
  struct Turn {
    Executor* executor;
    ActiveJob* active;
    int worker;
    Instant begin{};              // of the time not yet charged to the job
    uint64_t submitted_jobs = 0;  // at `begin`
    absl::Status status{};
  };

  void WorkerLoop(int worker);
  SchedulingPolicy::Entries TakeNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunBatch(const SchedulingPolicy::Entries& batch, int worker);
  void RunTurn(ActiveJob* active, int worker);
  void Begin(Turn& turn) const;
  bool IsOver(const Turn& turn) const;
  void RunTasks(Turn& turn);
  bool PassCheckpoint(Turn& turn);
  void RunInterruptingJobs(Turn& turn);
  // Returns true if this was the last worker of the job.
  bool Leave(const Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Finish(ActiveJob* active, Instant ended, int64_t batch_size = 1);
  absl::Status CheckAlive(const Job& job) const;

  const Clock& clock_;
  const int thread_count_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> busy_threads_{0};  // incremented under the lock
  std::atomic<int64_t> busy_ns_{0};
  std::atomic<int64_t> ended_tasks_{0};

  mutable Mutex mutex_;
  CondVar work_posted_;
  SchedulingPolicy policy_ ABSL_GUARDED_BY(mutex_);
  std::atomic<uint64_t> submitted_jobs_{0};  // incremented under the lock
  std::vector<std::thread> threads_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_EXECUTION_EXECUTOR_H_
