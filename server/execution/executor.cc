#include "server/execution/executor.h"

#include <pthread.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "server/base/check.h"

namespace rapt {
namespace {

// For top, gdb and perf.
constexpr char kThreadName[] = "rapt-compute";

}  // namespace

Executor::ActiveJob::ActiveJob(Job job_in, Instant submitted_in)
    : job(std::move(job_in)), submitted(submitted_in) {
  if (!job.stages.empty()) tasks = job.stages[0];
}

bool Executor::LeastVirtualTime::operator()(const ActiveJobPtr& a, const ActiveJobPtr& b) const {
  return std::tie(a->virtual_time, a->sequence) < std::tie(b->virtual_time, b->sequence);
}

Executor::Executor(int threads, const Clock& clock) : clock_(clock) {
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

void Executor::Submit(Job job) {
  auto active = std::make_shared<ActiveJob>(std::move(job), clock_.Now());
  const bool parallel = active->tasks > 1;
  MutexLock lock(mutex_);
  RAPT_CHECK(!stopping_, "a job came after the executor's end");
  active->virtual_time = virtual_now_;
  active->sequence = submitted_jobs_++;
  runnable_.insert(std::move(active));
  // Under the lock: the job may end, and the executor with it, as soon as that is free.
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
      job.run_task(static_cast<int>(stage), task, /*worker=*/0);
    }
  }
  report.compute_time = clock_.Now() - begin;
  job.done(report);
}

void Executor::WorkerLoop(int worker) {
  pthread_setname_np(pthread_self(), kThreadName);
  for (;;) {
    ActiveJobPtr active;
    {
      MutexLock lock(mutex_);
      while (runnable_.empty() && !stopping_) work_posted_.Wait(mutex_);
      if (runnable_.empty()) return;
      active = Join();
    }
    const Instant begin = clock_.Now();
    ++busy_threads_;
    absl::Status status = RunQuantum(*active, worker, begin);
    --busy_threads_;
    const std::chrono::nanoseconds used = clock_.Now() - begin;
    bool finished;
    {
      MutexLock lock(mutex_);
      finished = Leave(active, std::move(status), used);
    }
    if (finished) Finish(*active);
  }
}

Executor::ActiveJobPtr Executor::Join() {
  ActiveJobPtr active = *runnable_.begin();
  virtual_now_ = std::max(virtual_now_, active->virtual_time);
  if (active->started == Instant::max()) active->started = clock_.Now();
  ++active->workers;
  return active;
}

absl::Status Executor::RunQuantum(ActiveJob& active, int worker, Instant begin) {
  const Job& job = active.job;
  do {
    if (absl::Status status = CheckAlive(job); !status.ok()) {
      active.next_task.store(active.tasks, std::memory_order_relaxed);
      return status;
    }
    const int64_t task = active.next_task.fetch_add(1, std::memory_order_relaxed);
    if (task >= active.tasks) break;
    job.run_task(active.stage, task, worker);
    ended_tasks_.fetch_add(1, std::memory_order_relaxed);
  } while (clock_.Now() - begin < kQuantum);
  return absl::OkStatus();
}

bool Executor::Leave(const ActiveJobPtr& active, absl::Status status,
                     std::chrono::nanoseconds used) {
  runnable_.erase(active);  // its place in the order changes with its virtual time
  active->virtual_time += used;
  active->status.Update(status);
  --active->workers;
  if (active->next_task.load(std::memory_order_relaxed) < active->tasks) {
    runnable_.insert(active);
    return false;
  }
  if (active->workers > 0) return false;
  const int stages = static_cast<int>(active->job.stages.size());
  if (!active->status.ok() || active->stage + 1 >= stages) return true;
  ++active->stage;
  active->tasks = active->job.stages[active->stage];
  active->next_task.store(0, std::memory_order_relaxed);
  runnable_.insert(active);
  work_posted_.SignalAll();
  return false;
}

void Executor::Finish(ActiveJob& active) const {
  active.job.done({.status = active.status,
                   .queue_time = active.started - active.submitted,
                   .compute_time = clock_.Now() - active.started});
}

QueueState Executor::waiting() const {
  const Instant now = clock_.Now();
  QueueState state;
  MutexLock lock(mutex_);
  for (const ActiveJobPtr& active : runnable_) {
    if (active->started != Instant::max()) continue;
    ++state.depth;
    state.oldest_age = std::max(state.oldest_age, now - active->submitted);
  }
  return state;
}

absl::Status Executor::CheckAlive(const Job& job) const {
  if (job.cancelled != nullptr && job.cancelled->load(std::memory_order_relaxed)) {
    return absl::CancelledError("the caller gave the request up");
  }
  if (job.deadline != Instant::max() && clock_.Now() >= job.deadline) {
    return absl::DeadlineExceededError("the deadline passed before the answer was computed");
  }
  if (stopping_.load(std::memory_order_relaxed)) {
    return absl::UnavailableError("the server is shutting down");
  }
  return absl::OkStatus();
}

}  // namespace rapt
