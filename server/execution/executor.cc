#include "server/execution/executor.h"

#include <pthread.h>

#include <algorithm>
#include <tuple>
#include <utility>

#include "base/check.h"

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

Executor::Executor(int threads, const Clock& clock) : clock_(clock), thread_count_(threads) {
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
  RAPT_CHECK(job.company.name.empty() || (job.stages.size() == 1 && job.stages[0] == 1),
             "only a job of a single task has company");
  auto active = std::make_shared<ActiveJob>(std::move(job), clock_.Now());
  const bool parallel = active->tasks > 1;
  MutexLock lock(mutex_);
  RAPT_CHECK(!stopping_, "a job came after the executor's end");
  ++jobs_;
  active->virtual_time = virtual_now_;
  active->sequence = submitted_jobs_.fetch_add(1, std::memory_order_relaxed);
  const std::string& company = active->job.company.name;
  if (!company.empty()) companies_[company].insert(active);
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
      job.run_task(static_cast<int>(stage), task, /*worker=*/0, /*checkpoint=*/{});
    }
  }
  report.compute_time = clock_.Now() - begin;
  job.done(report);
}

void Executor::WorkerLoop(int worker) {
  pthread_setname_np(pthread_self(), kThreadName);
  for (;;) {
    Jobs jobs;
    {
      MutexLock lock(mutex_);
      while (runnable_.empty() && !stopping_) work_posted_.Wait(mutex_);
      if (runnable_.empty()) return;
      jobs = TakeUpNext();
      ++busy_threads_;
    }
    if (jobs.size() > 1) {
      RunTogether(std::move(jobs), worker);
    } else {
      RunTurn(std::move(jobs.front()), worker);
    }
    --busy_threads_;
  }
}

Executor::Jobs Executor::TakeUpNext() {
  Jobs jobs = ChooseCompany(*runnable_.begin());
  for (const ActiveJobPtr& job : jobs) {
    Join(job);
    if (jobs.size() > 1) runnable_.erase(job);  // its only task is handed out
  }
  return jobs;
}

Executor::Jobs Executor::ChooseCompany(const ActiveJobPtr& first) const {
  Jobs jobs = {first};
  const Company& company = first->job.company;
  const auto waiting = companies_.find(company.name);
  if (waiting == companies_.end() || waiting->second.count(first) == 0) return jobs;
  const bool is_last_free_thread = busy_threads() + 1 == threads();
  if (!is_last_free_thread || !CheckAlive(first->job).ok()) return jobs;
  double room = 1 - company.share;
  int left_behind = 0;
  for (const ActiveJobPtr& job : waiting->second) {
    if (job == first) continue;
    // Who is too late finds that out in a turn of its own.
    if (job->job.company.share <= room && CheckAlive(job->job).ok()) {
      room -= job->job.company.share;
      jobs.push_back(job);
    } else if (++left_behind == kMostLeftBehind) {
      break;
    }
  }
  return jobs;
}

void Executor::Join(const ActiveJobPtr& active) {
  virtual_now_ = std::max(virtual_now_, active->virtual_time);
  ++active->workers;
  if (active->started != Instant::max()) return;
  active->started = clock_.Now();
  const auto company = companies_.find(active->job.company.name);
  if (company == companies_.end()) return;
  company->second.erase(active);
  if (company->second.empty()) companies_.erase(company);
}

void Executor::RunTogether(Jobs jobs, int worker) {
  std::vector<CompanyMember> members;
  for (const ActiveJobPtr& job : jobs) members.push_back({job->job.company.member});
  const Instant begin = clock_.Now();
  jobs.front()->job.company.run_together(absl::MakeSpan(members), worker);
  const Instant end = clock_.Now();
  const int64_t done = std::count_if(members.begin(), members.end(),
                                     [](const CompanyMember& member) { return member.done; });
  ended_tasks_.fetch_add(done, std::memory_order_relaxed);
  {
    MutexLock lock(mutex_);
    MoveVirtualTime(end - begin);
    jobs_ -= done;
    for (size_t n = 0; n < jobs.size(); ++n) {
      if (!members[n].done) LetRunAlone(jobs[n]);
    }
  }
  for (size_t n = 0; n < jobs.size(); ++n) {
    if (members[n].done) Finish(*jobs[n], end, done);
    jobs[n].reset();  // what it holds is not kept while others answer
  }
}

void Executor::LetRunAlone(const ActiveJobPtr& active) {
  --active->workers;
  active->job.company = {};
  active->next_task.store(0, std::memory_order_relaxed);
  runnable_.insert(active);
  work_posted_.Signal();
}

void Executor::RunTurn(ActiveJobPtr active, int worker) {
  Turn turn{.executor = this, .active = std::move(active), .worker = worker};
  Begin(turn);
  RunTasks(turn);
  bool finished;
  {
    MutexLock lock(mutex_);
    finished = Leave(turn);
  }
  if (finished) Finish(*turn.active, clock_.Now());
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

bool Executor::PassCheckpoint(Turn& turn) {
  turn.status.Update(CheckAlive(turn.active->job));
  if (turn.status.ok() && IsOver(turn)) LetOthersIn(turn);
  return turn.status.ok();
}

// A job that comes anew need not wait for a quantum: it has been given the least time so far.
bool Executor::IsOver(const Turn& turn) const {
  return submitted_jobs_.load(std::memory_order_relaxed) != turn.submitted_jobs ||
         clock_.Now() - turn.begin >= kQuantum;
}

void Executor::LetOthersIn(Turn& turn) {
  for (;;) {
    ActiveJobPtr next;
    {
      MutexLock lock(mutex_);
      Charge(turn);
      next = NextBefore(*turn.active);
      if (next != nullptr) Join(next);
    }
    if (next != nullptr) RunTurn(next, turn.worker);
    Begin(turn);
    if (next == nullptr) return;
  }
}

Executor::ActiveJobPtr Executor::NextBefore(const ActiveJob& active) const {
  for (const ActiveJobPtr& next : runnable_) {
    if (next->virtual_time >= active.virtual_time) break;
    if (next->job.task_cost * kMuchLonger <= active.job.task_cost) return next;
  }
  return nullptr;
}

void Executor::Charge(const Turn& turn) {
  const std::chrono::nanoseconds used = clock_.Now() - turn.begin;
  const bool was_runnable = runnable_.erase(turn.active) > 0;  // its place in the order changes
  turn.active->virtual_time += used;
  if (was_runnable) runnable_.insert(turn.active);
  MoveVirtualTime(used);
}

void Executor::MoveVirtualTime(std::chrono::nanoseconds used) {
  // What each job would have had of it: new ones that keep coming are soon level with old ones.
  virtual_now_ += used / jobs_;
}

bool Executor::Leave(const Turn& turn) {
  const ActiveJobPtr& active = turn.active;
  Charge(turn);
  active->status.Update(turn.status);
  --active->workers;
  if (active->next_task.load(std::memory_order_relaxed) < active->tasks) return false;
  runnable_.erase(active);
  if (active->workers > 0) return false;
  const int stages = static_cast<int>(active->job.stages.size());
  if (!active->status.ok() || active->stage + 1 >= stages) {
    --jobs_;
    return true;
  }
  ++active->stage;
  active->tasks = active->job.stages[active->stage];
  active->next_task.store(0, std::memory_order_relaxed);
  runnable_.insert(active);
  work_posted_.SignalAll();
  return false;
}

void Executor::Finish(ActiveJob& active, Instant ended, int64_t together) {
  active.job.done({.status = active.status,
                   .queue_time = active.started - active.submitted,
                   .compute_time = ended - active.started,
                   .together = together});
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
