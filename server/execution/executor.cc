#include "server/execution/executor.h"

#include <pthread.h>

#include <algorithm>
#include <memory>
#include <utility>

#include "base/check.h"

namespace rapt {
namespace {

// For top, gdb and perf.
constexpr char kThreadName[] = "rapt-compute";

}  // namespace

Executor::ActiveJob::ActiveJob(Job job_in, Instant submitted_in)
    : Entry(std::move(job_in), submitted_in) {
  if (!job.stages.empty()) tasks = job.stages[0];
}

Executor::Executor(int threads, const Clock& clock)
    : clock_(clock), thread_count_(threads), policy_(clock) {
  RAPT_CHECK(threads >= 1, "an executor needs a thread");
  for (int worker = 0; worker < threads; ++worker) {
    threads_.emplace_back([this, worker] { WorkerLoop(worker); });
  }
}

Executor::~Executor() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  work_posted_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

void Executor::ExportTo(MetricSink& sink) const {
  ExportQueue(
      "threads", [this] { return waiting(); }, sink);
  sink.AddGauge("rapt_compute_threads", "Compute threads.", {}, [this] { return threads(); });
  sink.AddGauge("rapt_compute_threads_busy", "Compute threads that are running tasks.", {},
                [this] { return busy_threads(); });
  sink.AddCounter("rapt_compute_busy_seconds_total",
                  "Time that compute threads have spent running tasks, added up over all threads.",
                  {}, [this] { return std::chrono::duration<double>(busy_time()).count(); });
}

void Executor::Submit(Job job) {
  RAPT_CHECK(job.batch_group.name.empty() || (job.stages.size() == 1 && job.stages[0] == 1),
             "only a job of a single task has a batch group");
  auto active = std::make_unique<ActiveJob>(std::move(job), clock_.Now());
  const bool parallel = active->tasks > 1;
  MutexLock lock(mutex_);
  RAPT_CHECK(!stopping_, "a job was submitted while the executor was being destroyed");
  policy_.Add(active.release());
  submitted_jobs_.fetch_add(1, std::memory_order_relaxed);
  // Under the lock: as soon as it is released, the job may end and the executor be destroyed.
  if (parallel) {
    work_posted_.SignalAll();
  } else {
    work_posted_.Signal();
  }
}

void Executor::RunInline(Job job) {
  const Instant begin = clock_.Now();
  JobReport report;
  for (size_t stage = 0; stage < job.stages.size() && report.status.ok(); ++stage) {
    for (int64_t task = 0; task < job.stages[stage]; ++task) {
      report.status = CheckAlive(job);
      if (!report.status.ok()) break;
      job.run_task(static_cast<int>(stage), task, /*worker=*/0, /*checkpoint=*/{});
    }
  }
  report.compute_time = clock_.Now() - begin;
  job.done(report);
}

void Executor::WorkerLoop(int worker) {
  pthread_setname_np(pthread_self(), kThreadName);
  for (;;) {
    SchedulingPolicy::Entries next;
    {
      MutexLock lock(mutex_);
      while (policy_.empty() && !stopping_) work_posted_.Wait(mutex_);
      if (policy_.empty()) return;
      next = TakeNext();
      ++busy_threads_;
    }
    const Instant begin = clock_.Now();
    if (next.size() > 1) {
      RunBatch(next, worker);
    } else {
      RunTurn(static_cast<ActiveJob*>(next.front()), worker);
    }
    busy_ns_.fetch_add((clock_.Now() - begin).count(), std::memory_order_relaxed);
    --busy_threads_;
  }
}

SchedulingPolicy::Entries Executor::TakeNext() {
  const bool is_last_free_thread = busy_threads() + 1 == threads();
  SchedulingPolicy::Entries next = policy_.Take(
      is_last_free_thread,
      [this](const SchedulingPolicy::Entry& entry) { return CheckAlive(entry.job).ok(); });
  for (SchedulingPolicy::Entry* entry : next) ++static_cast<ActiveJob*>(entry)->workers;
  return next;
}

void Executor::RunBatch(const SchedulingPolicy::Entries& batch, int worker) {
  std::vector<BatchMember> members;
  for (const auto* entry : batch) members.push_back({entry->job.batch_group.member});
  const Instant begin = clock_.Now();
  batch.front()->job.batch_group.run_batch(absl::MakeSpan(members), worker);
  const Instant end = clock_.Now();
  const int64_t done = std::count_if(members.begin(), members.end(),
                                     [](const BatchMember& member) { return member.done; });
  ended_tasks_.fetch_add(done, std::memory_order_relaxed);
  absl::InlinedVector<ActiveJob*, 4> finished;
  {
    MutexLock lock(mutex_);
    policy_.ChargeBatch(begin);
    for (size_t n = 0; n < batch.size(); ++n) {
      auto* const active = static_cast<ActiveJob*>(batch[n]);
      if (members[n].done) {
        policy_.Remove(active);
        finished.push_back(active);
      } else {
        --active->workers;  // it runs alone, later
        policy_.Resume(active);
        work_posted_.Signal();
      }
    }
  }
  for (ActiveJob* active : finished) Finish(active, end, done);
}

void Executor::RunTurn(ActiveJob* active, int worker) {
  Turn turn{.executor = this, .active = active, .worker = worker};
  Begin(turn);
  RunTasks(turn);
  bool finished;
  {
    MutexLock lock(mutex_);
    finished = Leave(turn);
  }
  if (finished) Finish(active, clock_.Now());
}

void Executor::RunTasks(Turn& turn) {
  ActiveJob& active = *turn.active;
  const Checkpoint checkpoint{[](void* context) {
                                Turn& turn = *static_cast<Turn*>(context);
                                return turn.executor->PassCheckpoint(turn);
                              },
                              &turn};
  do {
    turn.status.Update(CheckAlive(active.job));
    if (!turn.status.ok()) {
      active.next_task.store(active.tasks, std::memory_order_relaxed);
      return;
    }
    const int64_t task = active.next_task.fetch_add(1, std::memory_order_relaxed);
    if (task >= active.tasks) return;
    active.job.run_task(active.stage, task, turn.worker, checkpoint);
    ended_tasks_.fetch_add(1, std::memory_order_relaxed);
  } while (!turn.status.ok() || clock_.Now() - turn.begin < kQuantum);
}

void Executor::Begin(Turn& turn) const {
  turn.begin = clock_.Now();
  turn.submitted_jobs = submitted_jobs_.load(std::memory_order_relaxed);
}

// A new job has received the least compute time, so it need not wait for the end of a quantum.
bool Executor::IsOver(const Turn& turn) const {
  return submitted_jobs_.load(std::memory_order_relaxed) != turn.submitted_jobs ||
         clock_.Now() - turn.begin >= kQuantum;
}

bool Executor::PassCheckpoint(Turn& turn) {
  turn.status.Update(CheckAlive(turn.active->job));
  if (turn.status.ok() && IsOver(turn)) RunInterruptingJobs(turn);
  return turn.status.ok();
}

void Executor::RunInterruptingJobs(Turn& turn) {
  for (;;) {
    ActiveJob* next;
    {
      MutexLock lock(mutex_);
      policy_.Charge(turn.active, turn.begin);
      next = static_cast<ActiveJob*>(policy_.TakeInterrupting(*turn.active));
      if (next != nullptr) ++next->workers;
    }
    if (next != nullptr) RunTurn(next, turn.worker);
    Begin(turn);
    turn.status.Update(CheckAlive(turn.active->job));
    if (next == nullptr || !turn.status.ok()) return;
  }
}

bool Executor::Leave(const Turn& turn) {
  ActiveJob* const active = turn.active;
  policy_.Charge(active, turn.begin);
  active->status.Update(turn.status);
  --active->workers;
  if (active->next_task.load(std::memory_order_relaxed) < active->tasks) return false;
  policy_.Pause(active);
  if (active->workers > 0) return false;
  const int stages = static_cast<int>(active->job.stages.size());
  if (!active->status.ok() || active->stage + 1 >= stages) {
    policy_.Remove(active);
    return true;
  }
  ++active->stage;
  active->tasks = active->job.stages[active->stage];
  active->next_task.store(0, std::memory_order_relaxed);
  policy_.Resume(active);
  work_posted_.SignalAll();
  return false;
}

void Executor::Finish(ActiveJob* active, Instant ended, int64_t batch_size) {
  const std::unique_ptr<ActiveJob> owner(active);
  active->job.done({.status = active->status,
                    .queue_time = active->started - active->submitted,
                    .compute_time = ended - active->started,
                    .batch_size = batch_size});
}

QueueState Executor::waiting() const {
  MutexLock lock(mutex_);
  return policy_.waiting();
}

absl::Status Executor::CheckAlive(const Job& job) const {
  if (job.cancelled != nullptr && job.cancelled->load(std::memory_order_relaxed)) {
    return absl::CancelledError("the caller cancelled the request");
  }
  if (job.deadline != Instant::max() && clock_.Now() >= job.deadline) {
    return absl::DeadlineExceededError("the deadline passed before the result was computed");
  }
  if (stopping_.load(std::memory_order_relaxed)) {
    return absl::UnavailableError("the server is shutting down");
  }
  return absl::OkStatus();
}

}  // namespace rapt
