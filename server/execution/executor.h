// The compute threads that all requests share.
#ifndef RAPT_SERVER_EXECUTION_EXECUTOR_H_
#define RAPT_SERVER_EXECUTION_EXECUTOR_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/inlined_vector.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/checkpoint.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "server/queue_state.h"

namespace rapt {

struct JobReport {
  // DeadlineExceeded or Cancelled where a job was given up between two tasks or at a checkpoint,
  // Unavailable where the executor went first.
  absl::Status status;
  std::chrono::nanoseconds queue_time{0};    // until a thread took it up
  std::chrono::nanoseconds compute_time{0};  // from then on
  int64_t together = 1;                      // jobs that its run computed, this one among them
};

// A job that runs together with others.
struct CompanyMember {
  void* job = nullptr;  // Company::member
  bool done = false;    // its task is; one that is not runs alone, later
};

// Whom a job of a single task may run together with.
struct Company {
  std::string name;  // jobs of the same one may; empty: this one runs alone
  // Of what a run has room for. Those that run together have at most 1 in all.
  double share = 1;
  // Runs the tasks of at least two jobs, in the place of their run_task, or of some of them. Any is
  // asked: it is the same function for all of a company.
  void (*run_together)(absl::Span<CompanyMember> members, int worker) = nullptr;
  void* member = nullptr;  // what it knows this job by
};

// Work cut into tasks, as a plan cuts attention.
struct Job {
  // How many tasks each stage has. Those of one stage are independent and may run in any order; a
  // stage starts when the one before it is done.
  absl::InlinedVector<int64_t, 3> stages;
  // Called from several threads at once, never after done. `worker` is in [0, threads()); no two
  // calls at once have the same.
  absl::AnyInvocable<void(int stage, int64_t task, int worker, const Checkpoint& checkpoint) const>
      run_task;
  // About how much work its longest task is, in a unit that all jobs share. A job interrupts, at
  // their checkpoints, only tasks that are much longer than its own.
  double task_cost = std::numeric_limits<double>::infinity();
  Company company;
  Instant deadline = Instant::max();
  const std::atomic<bool>* cancelled = nullptr;  // null: never
  absl::AnyInvocable<void(const JobReport&)> done;
};

// Runs the tasks of many jobs on a fixed number of threads. The job that had the least compute time
// comes next ("virtual time"; a new job starts level with those that run), for at most kQuantum
// before the choice is made anew, so that a short job overtakes a long one. At a checkpoint of a
// task the thread first works on jobs of much shorter tasks that come before its own. Tasks never
// depend on the load, only their order in time does. Deadline and cancellation are looked at
// between tasks and at checkpoints.
//
// The thread that takes up a job while no other is free takes along as many of its company as there
// is room for, of those that no thread has taken up, first come first served. So nobody waits for
// company, nor shares a thread where there is another. Their one run is not interrupted by others.
//
// Thread-safe. A job's done runs exactly once, after its last task and outside any lock.
// Destruction gives up the jobs in flight and returns when their dones have run.
class Executor {
 public:
  static constexpr std::chrono::milliseconds kQuantum{2};

  Executor(int threads, const Clock& clock);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  int threads() const { return thread_count_; }
  // Threads that run tasks now.
  int busy_threads() const { return busy_threads_.load(std::memory_order_relaxed); }
  // Tasks that compute threads have brought to their end, of all jobs since the start.
  int64_t ended_tasks() const { return ended_tasks_.load(std::memory_order_relaxed); }
  // Jobs that no thread has taken up yet.
  QueueState waiting() const;

  // Returns at once; done runs on a compute thread.
  void Submit(Job job);

  // Runs the job on the calling thread as worker 0, done included. For jobs that cost less than a
  // thread switch.
  void RunInline(Job job);

 private:
  // A job on its way: tasks of one stage are handed out by next_task, a stage is over when they are
  // all handed out and no worker is in it any more.
  struct ActiveJob {
    ActiveJob(Job job, Instant submitted);

    Job job;
    int stage = 0;
    int64_t tasks = 0;  // of the stage
    std::atomic<int64_t> next_task{0};
    int workers = 0;  // in the stage now
    absl::Status status;
    Instant submitted;
    Instant started = Instant::max();
    std::chrono::nanoseconds virtual_time{0};
    uint64_t sequence = 0;  // of submission; breaks ties
  };
  // Shared by the queue and the workers that are in the job.
  using ActiveJobPtr = std::shared_ptr<ActiveJob>;
  struct LeastVirtualTime {
    bool operator()(const ActiveJobPtr& a, const ActiveJobPtr& b) const;
  };
  using JobQueue = std::set<ActiveJobPtr, LeastVirtualTime>;
  using Jobs = absl::InlinedVector<ActiveJobPtr, 4>;

  // A worker's time with a job: a quantum, and what its last task takes beyond it.
  struct Turn {
    Executor* executor;
    ActiveJobPtr active;
    int worker;
    Instant begin{};              // of what has not been charged to the job yet
    uint64_t submitted_jobs = 0;  // then
    absl::Status status{};
  };
  // How much longer a task is than those that interrupt it, so that they do not hold it up for
  // long, nor pile up on the stack, nor are ever of its own job.
  static constexpr double kMuchLonger = 4;
  // A job looks at so many that it can't take along before it goes without more: a choice costs as
  // much as it takes along, however many wait.
  static constexpr int kMostLeftBehind = 16;

  void WorkerLoop(int worker);
  // The first job that may interrupt a task of `active`; null where there is none.
  ActiveJobPtr NextBefore(const ActiveJob& active) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The job that comes next, and those that it takes along.
  Jobs TakeUpNext() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // The first, and others of its company.
  Jobs ChooseCompany(const ActiveJobPtr& first) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Join(const ActiveJobPtr& active) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunTogether(Jobs jobs, int worker);
  // Of a job whose task a run did not do.
  void LetRunAlone(const ActiveJobPtr& active) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void RunTurn(ActiveJobPtr active, int worker);
  void RunTasks(Turn& turn);
  void Begin(Turn& turn) const;
  bool IsOver(const Turn& turn) const;
  bool PassCheckpoint(Turn& turn);
  void LetOthersIn(Turn& turn);
  // For the time since the turn's begin.
  void Charge(const Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MoveVirtualTime(std::chrono::nanoseconds used) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // True when this was the last of the job.
  bool Leave(const Turn& turn) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  static void Finish(ActiveJob& active, Instant ended, int64_t together = 1);
  absl::Status CheckAlive(const Job& job) const;

  const Clock& clock_;
  const int thread_count_;
  std::atomic<bool> stopping_{false};
  std::atomic<int> busy_threads_{0};  // counted up under the lock
  std::atomic<int64_t> ended_tasks_{0};

  mutable Mutex mutex_;
  CondVar work_posted_;
  // Jobs with tasks to hand out.
  JobQueue runnable_ ABSL_GUARDED_BY(mutex_);
  // Of these, by their company's name, those that have one and that no thread has taken up.
  std::map<std::string, JobQueue> companies_ ABSL_GUARDED_BY(mutex_);
  int64_t jobs_ ABSL_GUARDED_BY(mutex_) = 0;  // on their way
  std::chrono::nanoseconds virtual_now_ ABSL_GUARDED_BY(mutex_){0};
  std::atomic<uint64_t> submitted_jobs_{0};  // counted under the lock
  std::vector<std::thread> threads_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_EXECUTION_EXECUTOR_H_
