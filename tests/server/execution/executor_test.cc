#include "server/execution/executor.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "tests/support/fake_clock.h"

namespace rapt {
namespace {

using std::chrono::milliseconds;

using Task = std::function<void(int stage, int64_t task, int worker)>;
using LongTask = std::function<void(const Checkpoint& checkpoint)>;

// A latch: absl::Notification is not instrumented for ThreadSanitizer.
class Event {
 public:
  void Set() {
    std::lock_guard<std::mutex> lock(mutex_);
    set_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return set_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool set_ = false;
};

Job MakeJob(Task task, absl::InlinedVector<int64_t, 3> stages,
            absl::AnyInvocable<void(const JobReport&)> done) {
  Job job;
  job.stages = std::move(stages);
  job.run_task = [task = std::move(task)](int stage, int64_t number, int worker,
                                          const Checkpoint&) { task(stage, number, worker); };
  job.done = std::move(done);
  return job;
}

Job MakeLongJob(LongTask task, double task_cost, absl::InlinedVector<int64_t, 3> stages,
                absl::AnyInvocable<void(const JobReport&)> done) {
  Job job;
  job.stages = std::move(stages);
  job.run_task = [task = std::move(task)](int, int64_t, int, const Checkpoint& checkpoint) {
    task(checkpoint);
  };
  job.task_cost = task_cost;
  job.done = std::move(done);
  return job;
}

bool Pass(const Checkpoint& checkpoint) { return checkpoint.go_on(checkpoint.context); }

// Waits for the report of a job.
class Outcome {
 public:
  absl::AnyInvocable<void(const JobReport&)> Callback() {
    return [this](const JobReport& report) {
      report_ = report;
      ++calls_;
      thread_ = std::this_thread::get_id();
      event_.Set();
    };
  }
  const JobReport& Wait() {
    event_.Wait();
    return report_;
  }
  int calls() const { return calls_; }
  std::thread::id thread() const { return thread_; }

 private:
  Event event_;
  JobReport report_;
  std::atomic<int> calls_{0};
  std::thread::id thread_;
};

TEST(ExecutorTest, RunsEveryTaskOnceAndStagesInOrder) {
  constexpr int kThreads = 4;
  std::mutex mutex;
  std::multiset<std::pair<int, int64_t>> seen;
  std::atomic<int> done_in_first_stage{0};
  const Task task = [&](int stage, int64_t task, int) {
    if (stage == 0) ++done_in_first_stage;
    if (stage == 1) {
      EXPECT_EQ(done_in_first_stage, 100) << "a stage is a barrier";
    }
    std::lock_guard<std::mutex> lock(mutex);
    seen.emplace(stage, task);
  };
  const SteadyClock clock;
  Executor executor(kThreads, clock);
  Outcome outcome;
  executor.Submit(MakeJob(task, {100, 7}, outcome.Callback()));
  EXPECT_TRUE(outcome.Wait().status.ok());
  std::multiset<std::pair<int, int64_t>> expected;
  for (int64_t task = 0; task < 100; ++task) expected.emplace(0, task);
  for (int64_t task = 0; task < 7; ++task) expected.emplace(1, task);
  EXPECT_EQ(seen, expected);
}

TEST(ExecutorTest, GivesConcurrentTasksOfAJobDifferentWorkers) {
  constexpr int kThreads = 4;
  std::array<std::atomic<int>, kThreads> users{};
  const Task task = [&](int, int64_t, int worker) {
    ASSERT_GE(worker, 0);
    ASSERT_LT(worker, kThreads);
    EXPECT_EQ(users[worker]++, 0) << "worker " << worker << " is in use";
    std::this_thread::yield();
    --users[worker];
  };
  const SteadyClock clock;
  Executor executor(kThreads, clock);
  Outcome outcome;
  executor.Submit(MakeJob(task, {2000}, outcome.Callback()));
  EXPECT_TRUE(outcome.Wait().status.ok());
}

TEST(ExecutorTest, RunsDoneOnAComputeThreadEvenWithoutTasks) {
  const Task task = [](int, int64_t, int) { FAIL() << "there is no task"; };
  const SteadyClock clock;
  Executor executor(2, clock);
  for (const absl::InlinedVector<int64_t, 3>& stages :
       {absl::InlinedVector<int64_t, 3>{}, absl::InlinedVector<int64_t, 3>{0, 0}}) {
    Outcome outcome;
    executor.Submit(MakeJob(task, stages, outcome.Callback()));
    EXPECT_TRUE(outcome.Wait().status.ok());
    EXPECT_NE(outcome.thread(), std::this_thread::get_id());
  }
}

TEST(ExecutorTest, RunsAnInlineJobOnTheCallersThreadAsWorkerZero) {
  const std::thread::id caller = std::this_thread::get_id();
  std::vector<std::pair<int, int64_t>> order;
  const Task task = [&](int stage, int64_t task, int worker) {
    EXPECT_EQ(worker, 0);
    EXPECT_EQ(std::this_thread::get_id(), caller);
    order.emplace_back(stage, task);
  };
  const SteadyClock clock;
  Executor executor(1, clock);
  Outcome outcome;
  executor.RunInline(MakeJob(task, {2, 1}, outcome.Callback()));
  EXPECT_EQ(outcome.calls(), 1);
  EXPECT_TRUE(outcome.Wait().status.ok());
  EXPECT_EQ(order, (std::vector<std::pair<int, int64_t>>{{0, 0}, {0, 1}, {1, 0}}));
}

TEST(ExecutorTest, StopsBetweenTasksWhenCancelled) {
  std::atomic<bool> cancelled{false};
  std::atomic<int> tasks{0};
  const Task task = [&](int, int64_t, int) {
    if (++tasks == 3) cancelled = true;
  };
  const SteadyClock clock;
  Executor executor(1, clock);
  for (const bool run_inline : {false, true}) {
    tasks = 0;
    cancelled = false;
    Outcome outcome;
    Job job = MakeJob(task, {100, 100}, outcome.Callback());
    job.cancelled = &cancelled;
    if (run_inline) {
      executor.RunInline(std::move(job));
    } else {
      executor.Submit(std::move(job));
    }
    EXPECT_EQ(outcome.Wait().status.code(), absl::StatusCode::kCancelled);
    EXPECT_EQ(tasks, 3) << "no task may start after the cancellation";
  }
}

TEST(ExecutorTest, StopsBetweenTasksWhenTheDeadlinePasses) {
  test::FakeClock clock;
  std::atomic<int> tasks{0};
  const Task task = [&](int, int64_t, int) {
    ++tasks;
    clock.Advance(milliseconds(10));
  };
  Executor executor(1, clock);
  Outcome outcome;
  Job job = MakeJob(task, {100}, outcome.Callback());
  job.deadline = clock.Now() + milliseconds(35);
  executor.Submit(std::move(job));
  EXPECT_EQ(outcome.Wait().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(tasks, 4);
}

TEST(ExecutorTest, StartsNoTaskPastTheDeadline) {
  test::FakeClock clock;
  const Task task = [](int, int64_t, int) { FAIL() << "the deadline has passed"; };
  Executor executor(2, clock);
  Outcome outcome;
  Job job = MakeJob(task, {5}, outcome.Callback());
  job.deadline = clock.Now();
  executor.Submit(std::move(job));
  EXPECT_EQ(outcome.Wait().status.code(), absl::StatusCode::kDeadlineExceeded);
}

// Every task records its job's name and takes a quantum of fake time.
class FairnessTest : public ::testing::Test {
 protected:
  Job NamedJob(int64_t name, int64_t tasks, Outcome& outcome) {
    const auto task = [this, name](int, int64_t, int) {
      if (order_.empty()) {
        first_task_started_.Set();
        all_submitted_.Wait();
      }
      order_.push_back(name);
      clock_.Advance(Executor::kQuantum);
    };
    return MakeJob(task, {tasks}, outcome.Callback());
  }

  test::FakeClock clock_;
  Event first_task_started_;
  Event all_submitted_;
  std::vector<int64_t> order_;  // written by the only worker, read after the jobs have ended
};

TEST_F(FairnessTest, AShortJobOvertakesALongOne) {
  Executor executor(1, clock_);
  Outcome long_outcome, short_outcome;
  executor.Submit(NamedJob(1, 100, long_outcome));
  first_task_started_.Wait();
  executor.Submit(NamedJob(2, 2, short_outcome));
  all_submitted_.Set();
  short_outcome.Wait();
  long_outcome.Wait();
  ASSERT_EQ(order_.size(), 102u);
  const std::vector<int64_t> start(order_.begin(), order_.begin() + 6);
  EXPECT_EQ(start, (std::vector<int64_t>{1, 2, 1, 2, 1, 1}));
}

TEST_F(FairnessTest, JobsOfOneLengthShareTheTimeEvenly) {
  Executor executor(1, clock_);
  Outcome outcomes[3];
  executor.Submit(NamedJob(0, 10, outcomes[0]));
  first_task_started_.Wait();
  executor.Submit(NamedJob(1, 10, outcomes[1]));
  executor.Submit(NamedJob(2, 10, outcomes[2]));
  all_submitted_.Set();
  for (Outcome& outcome : outcomes) outcome.Wait();
  ASSERT_EQ(order_.size(), 30u);
  std::array<int, 3> run{};
  for (const int64_t job : order_) {
    ++run[job];
    const auto [least, most] = std::minmax_element(run.begin(), run.end());
    EXPECT_LE(*most - *least, 2) << "after " << run[0] + run[1] + run[2] << " tasks";
  }
}

TEST(ExecutorTest, KeepsAJobForAQuantum) {
  test::FakeClock clock;
  Event started, submitted;
  std::vector<int64_t> order;
  const auto named_task = [&](int64_t name) -> Task {
    return [&, name](int, int64_t, int) {
      if (order.empty()) {
        started.Set();
        submitted.Wait();
      }
      order.push_back(name);
      clock.Advance(std::chrono::nanoseconds(Executor::kQuantum) / 4);
    };
  };
  Executor executor(1, clock);
  Outcome first, second;
  executor.Submit(MakeJob(named_task(1), {6}, first.Callback()));
  started.Wait();
  executor.Submit(MakeJob(named_task(2), {6}, second.Callback()));
  submitted.Set();
  first.Wait();
  second.Wait();
  EXPECT_EQ(order, (std::vector<int64_t>{1, 1, 1, 1, 2, 2, 2, 2, 1, 1, 2, 2}));
}

// Another job is submitted while the only thread runs a task of cost 100, before its checkpoint.
class CheckpointTest : public ::testing::Test {
 protected:
  // Returns whether another job, with `tasks` tasks of that cost, ended before the long task
  // continued.
  bool Overtakes(double cost, int64_t tasks) {
    Executor executor(1, clock_);
    Event started, submitted;
    Outcome long_outcome, other_outcome;
    bool overtaken = false;
    executor.Submit(MakeLongJob(
        [&](const Checkpoint& checkpoint) {
          started.Set();
          submitted.Wait();
          clock_.Advance(Executor::kQuantum);
          EXPECT_TRUE(Pass(checkpoint));
          overtaken = other_outcome.calls() == 1;
        },
        100, {1}, long_outcome.Callback()));
    started.Wait();
    executor.Submit(
        MakeLongJob([](const Checkpoint&) {}, cost, {tasks, 1}, other_outcome.Callback()));
    submitted.Set();
    EXPECT_TRUE(long_outcome.Wait().status.ok());
    EXPECT_TRUE(other_outcome.Wait().status.ok());
    return overtaken;
  }

  test::FakeClock clock_;
};

TEST_F(CheckpointTest, AJobOfMuchShorterTasksInterruptsALongOne) {
  EXPECT_TRUE(Overtakes(25, 1));
  EXPECT_TRUE(Overtakes(0, 50));
}

TEST_F(CheckpointTest, AJobOfLongTasksInterruptsNothing) {
  EXPECT_FALSE(Overtakes(26, 1));
  EXPECT_FALSE(Overtakes(1e9, 1));
}

TEST_F(CheckpointTest, AJobWithLessTimeContinues) {
  Executor executor(1, clock_);
  Event started, submitted;
  Outcome long_outcome, short_outcome;
  int short_tasks = 0;
  std::vector<int> seen;
  executor.Submit(MakeLongJob(
      [&](const Checkpoint& checkpoint) {
        started.Set();
        submitted.Wait();
        for (int n = 0; n < 3; ++n) {
          clock_.Advance(2 * Executor::kQuantum);
          EXPECT_TRUE(Pass(checkpoint));
          seen.push_back(short_tasks);
        }
      },
      100, {1}, long_outcome.Callback()));
  started.Wait();
  executor.Submit(MakeLongJob(
      [&](const Checkpoint&) {
        ++short_tasks;
        clock_.Advance(Executor::kQuantum);
      },
      1, {100}, short_outcome.Callback()));
  submitted.Set();
  long_outcome.Wait();
  short_outcome.Wait();
  EXPECT_EQ(seen, (std::vector<int>{2, 4, 6})) << "both have half of the time";
}

TEST_F(CheckpointTest, AnAbandonedTaskStopsAtACheckpoint) {
  Executor executor(1, clock_);
  std::atomic<bool> cancelled{false};
  Outcome cancelled_outcome, late_outcome;
  Job job = MakeLongJob(
      [&](const Checkpoint& checkpoint) {
        EXPECT_TRUE(Pass(checkpoint));
        cancelled = true;
        EXPECT_FALSE(Pass(checkpoint));
      },
      100, {1}, cancelled_outcome.Callback());
  job.cancelled = &cancelled;
  executor.Submit(std::move(job));
  EXPECT_EQ(cancelled_outcome.Wait().status.code(), absl::StatusCode::kCancelled);

  job = MakeLongJob(
      [&](const Checkpoint& checkpoint) {
        EXPECT_TRUE(Pass(checkpoint));
        clock_.Advance(milliseconds(10));
        EXPECT_FALSE(Pass(checkpoint));
      },
      100, {1}, late_outcome.Callback());
  job.deadline = clock_.Now() + milliseconds(10);
  executor.Submit(std::move(job));
  EXPECT_EQ(late_outcome.Wait().status.code(), absl::StatusCode::kDeadlineExceeded);
}

// One thread, kept busy while jobs with a batch group are submitted. Each run records its jobs and
// takes 5 ms.
class BatchTest : public ::testing::Test {
 protected:
  struct Participant {
    BatchTest& test;
    int name;
  };

  // Runs nothing else until Release().
  void Hold(Executor& executor) {
    executor.Submit(MakeLongJob(
        [this](const Checkpoint& checkpoint) {
          held_.Set();
          released_.Wait();
          EXPECT_TRUE(Pass(checkpoint));
        },
        100, {1}, holder_.Callback()));
    held_.Wait();
  }
  void Release() { released_.Set(); }

  Job NewParticipant(int name, std::string group, double cost, Outcome& outcome) {
    Participant& participant = participants_.emplace_back(Participant{*this, name});
    Job job = MakeJob([&participant](int, int64_t, int) { participant.test.Note({&participant}); },
                      {1}, outcome.Callback());
    job.batch_group = {.name = std::move(group),
                       .batch_cost = cost,
                       .run_batch =
                           [](absl::Span<BatchMember> members, int) {
                             std::vector<const Participant*> participants;
                             for (BatchMember& member : members) {
                               const auto& participant =
                                   *static_cast<const Participant*>(member.job);
                               member.done = participant.test.skipped_.count(participant.name) == 0;
                               participants.push_back(&participant);
                             }
                             participants.front()->test.Note(participants);
                           },
                       .member = &participant};
    return job;
  }

  void Note(const std::vector<const Participant*>& participants) {
    std::vector<int>& run = runs_.emplace_back();
    for (const Participant* participant : participants) run.push_back(participant->name);
    clock_.Advance(milliseconds(5));
  }

  using Runs = std::vector<std::vector<int>>;

  test::FakeClock clock_;
  Event held_, released_;
  Outcome holder_;
  std::deque<Participant> participants_;  // a deque for stable addresses
  std::set<int> skipped_;                 // by every run
  Runs runs_;  // written by the only thread, read after the jobs have ended
};

TEST_F(BatchTest, WaitingJobsRunAsOne) {
  std::vector<Outcome> outcomes(3);
  Executor executor(1, clock_);
  Hold(executor);
  for (int n = 0; n < 3; ++n) {
    executor.Submit(NewParticipant(n, "a", .25, outcomes[n]));
    clock_.Advance(milliseconds(1));
  }
  EXPECT_EQ(executor.waiting().depth, 3);
  Release();
  for (int n = 0; n < 3; ++n) {
    const JobReport& report = outcomes[n].Wait();
    EXPECT_TRUE(report.status.ok());
    EXPECT_EQ(report.batch_size, 3);
    EXPECT_EQ(report.queue_time, milliseconds(3 - n)) << "each has its own queue time";
    EXPECT_EQ(report.compute_time, milliseconds(5));
    EXPECT_EQ(outcomes[n].calls(), 1);
  }
  EXPECT_EQ(runs_, (Runs{{0, 1, 2}}));
  EXPECT_EQ(holder_.Wait().batch_size, 1);
  EXPECT_EQ(executor.ended_tasks(), 4);
  EXPECT_EQ(executor.waiting().depth, 0);
  while (executor.busy_threads() > 0) std::this_thread::yield();
  EXPECT_EQ(executor.busy_time(), milliseconds(3 + 5)) << "the holder's and the batch's";
}

TEST_F(BatchTest, NoJobWaitsForOthersToJoin) {
  Executor executor(1, clock_);
  for (int n = 0; n < 2; ++n) {
    Outcome outcome;
    executor.Submit(NewParticipant(n, "a", .25, outcome));
    EXPECT_EQ(outcome.Wait().batch_size, 1);
  }
  EXPECT_EQ(runs_, (Runs{{0}, {1}}));
}

TEST(ExecutorTest, JobsDoNotShareAThreadWhileAnotherIsFree) {
  // Each job of the group continues when the other has started.
  struct Participant {
    Event started;
    Event* other_started = nullptr;
    Outcome outcome;
  };
  const SteadyClock clock;
  for (int round = 0; round < 100; ++round) {
    Participant participants[2];
    Executor executor(2, clock);
    for (int n = 0; n < 2; ++n) {
      Participant& participant = participants[n];
      participant.other_started = &participants[1 - n].started;
      Job job = MakeJob(
          [&participant](int, int64_t, int) {
            participant.started.Set();
            participant.other_started->Wait();
          },
          {1}, participant.outcome.Callback());
      job.batch_group = {.name = "a",
                         .batch_cost = .25,
                         .run_batch = [](absl::Span<BatchMember>,
                                         int) { ADD_FAILURE() << "the other thread is idle"; },
                         .member = &participant};
      executor.Submit(std::move(job));
    }
    for (Participant& participant : participants)
      EXPECT_EQ(participant.outcome.Wait().batch_size, 1);
  }
}

TEST_F(BatchTest, ABatchRespectsTheCapacityOfARun) {
  const double costs[] = {.5, .25, .5, .25, .5, 1, .125};
  std::vector<Outcome> outcomes(std::size(costs));
  Executor executor(1, clock_);
  Hold(executor);
  for (size_t n = 0; n < outcomes.size(); ++n) {
    executor.Submit(NewParticipant(static_cast<int>(n), "a", costs[n], outcomes[n]));
  }
  Release();
  for (Outcome& outcome : outcomes) EXPECT_TRUE(outcome.Wait().status.ok());
  EXPECT_EQ(runs_, (Runs{{0, 1, 3}, {2, 4}, {5}, {6}}));
}

TEST_F(BatchTest, OnlyJobsOfOneGroupShareARun) {
  const char* const groups[] = {"a", "b", "", "a", "b", "", "a"};
  std::vector<Outcome> outcomes(std::size(groups));
  Executor executor(1, clock_);
  Hold(executor);
  for (size_t n = 0; n < outcomes.size(); ++n) {
    executor.Submit(NewParticipant(static_cast<int>(n), groups[n], .25, outcomes[n]));
  }
  Release();
  for (Outcome& outcome : outcomes) EXPECT_TRUE(outcome.Wait().status.ok());
  EXPECT_EQ(runs_, (Runs{{0, 3, 6}, {1, 4}, {2}, {5}}));
}

TEST_F(BatchTest, CancelledAndExpiredJobsDoNotJoin) {
  const std::atomic<bool> cancelled{true};
  std::vector<Outcome> outcomes(6);
  Executor executor(1, clock_);
  Hold(executor);
  for (int n = 0; n < 6; ++n) {
    Job job = NewParticipant(n, "a", .125, outcomes[n]);
    if (n == 0 || n == 2) job.cancelled = &cancelled;
    if (n == 4) job.deadline = clock_.Now() + milliseconds(1);
    executor.Submit(std::move(job));
  }
  clock_.Advance(milliseconds(1));
  Release();
  for (const int n : {0, 2}) {
    EXPECT_EQ(outcomes[n].Wait().status.code(), absl::StatusCode::kCancelled) << n;
  }
  EXPECT_EQ(outcomes[4].Wait().status.code(), absl::StatusCode::kDeadlineExceeded);
  for (const int n : {1, 3, 5}) EXPECT_TRUE(outcomes[n].Wait().status.ok()) << n;
  EXPECT_EQ(runs_, (Runs{{1, 3, 5}}));
}

TEST_F(BatchTest, ASkippedMemberRunsAlone) {
  skipped_ = {1, 2};
  Outcome outcomes[4];
  Executor executor(1, clock_);
  Hold(executor);
  for (int n = 0; n < 4; ++n) executor.Submit(NewParticipant(n, "a", .25, outcomes[n]));
  Release();
  for (const int n : {0, 3}) EXPECT_EQ(outcomes[n].Wait().batch_size, 2) << n;
  for (const int n : {1, 2}) {
    EXPECT_TRUE(outcomes[n].Wait().status.ok()) << n;
    EXPECT_EQ(outcomes[n].Wait().batch_size, 1) << n;
    EXPECT_EQ(outcomes[n].calls(), 1) << n;
  }
  EXPECT_EQ(runs_, (Runs{{0, 1, 2, 3}, {1}, {2}}));
  EXPECT_EQ(executor.ended_tasks(), 5);
}

TEST_F(BatchTest, AnExpiredSkippedMemberDoesNotAffectTheOthers) {
  skipped_ = {1};
  Outcome outcomes[2];
  Executor executor(1, clock_);
  Hold(executor);
  for (int n = 0; n < 2; ++n) {
    Job job = NewParticipant(n, "a", .25, outcomes[n]);
    job.deadline = clock_.Now() + milliseconds(1);  // the run takes longer
    executor.Submit(std::move(job));
  }
  Release();
  EXPECT_TRUE(outcomes[0].Wait().status.ok());
  EXPECT_EQ(outcomes[1].Wait().status.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_EQ(runs_, (Runs{{0, 1}}));
}

TEST_F(BatchTest, AnInterruptingJobRunsAlone) {
  Outcome outcomes[2];
  Executor executor(1, clock_);
  Hold(executor);
  for (int n = 0; n < 2; ++n) {
    Job job = NewParticipant(n, "a", .25, outcomes[n]);
    job.task_cost = 1;
    executor.Submit(std::move(job));
  }
  clock_.Advance(Executor::kQuantum);
  Release();
  for (Outcome& outcome : outcomes) EXPECT_EQ(outcome.Wait().batch_size, 1);
  EXPECT_EQ(runs_, (Runs{{0}, {1}})) << "once each";
  EXPECT_TRUE(holder_.Wait().status.ok());
}

TEST_F(BatchTest, ALongJobProgressesUnderASteadyFlowOfShortOnes) {
  for (const char* const group : {"", "a"}) {
    bool over = false;  // used by the only thread
    Outcome unused;
    std::function<void()> submit_another;
    Event started, submitted, ended;
    Executor executor(1, clock_);
    submit_another = [&] {
      Job job = NewParticipant(0, group, .5, unused);
      job.done = [&](const JobReport&) {
        if (!over) submit_another();
      };
      executor.Submit(std::move(job));
    };
    executor.Submit(MakeJob(
        [&](int, int64_t, int) {
          started.Set();
          submitted.Wait();
          clock_.Advance(Executor::kQuantum);
        },
        {10},
        [&](const JobReport& report) {
          EXPECT_TRUE(report.status.ok());
          over = true;
          ended.Set();
        }));
    started.Wait();
    for (int n = 0; n < 2; ++n) submit_another();
    submitted.Set();
    ended.Wait();
  }
}

TEST_F(BatchTest, DestructionAbandonsWaitingJobs) {
  Event started;
  Outcome outcomes[3];
  {
    Executor executor(1, clock_);
    executor.Submit(MakeLongJob(
        [&](const Checkpoint& checkpoint) {
          started.Set();
          while (Pass(checkpoint)) std::this_thread::yield();
        },
        100, {1}, holder_.Callback()));
    started.Wait();
    for (int n = 0; n < 3; ++n) executor.Submit(NewParticipant(n, "a", .25, outcomes[n]));
  }
  for (Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.calls(), 1);
    EXPECT_EQ(outcome.Wait().status.code(), absl::StatusCode::kUnavailable);
  }
  EXPECT_EQ(runs_, Runs{});
}

TEST(ExecutorTest, ComputesEachOfThousandsOfBatchedJobsOnce) {
  struct Participant {
    int group;
    double cost;
    std::atomic<int> runs{0};
    Outcome outcome;
  };
  constexpr int kCallers = 3;
  constexpr int kParticipants = 1500;  // for each caller
  std::deque<Participant> participants(kCallers * kParticipants);
  const SteadyClock clock;
  {
    Executor executor(3, clock);
    const auto submit = [&](int n) {
      Participant& participant = participants[n];
      participant.group = n % 5;
      participant.cost = 1.0 / (1 + n % 7);
      Job job = MakeJob([&participant](int, int64_t, int) { ++participant.runs; }, {1},
                        participant.outcome.Callback());
      job.batch_group = {.name = std::to_string(participant.group),
                         .batch_cost = participant.cost,
                         .run_batch =
                             [](absl::Span<BatchMember> members, int) {
                               EXPECT_GE(members.size(), 2u);
                               double sum = 0;
                               for (BatchMember& member : members) {
                                 Participant& participant = *static_cast<Participant*>(member.job);
                                 EXPECT_EQ(participant.group,
                                           static_cast<Participant*>(members[0].job)->group);
                                 sum += participant.cost;
                                 member.done = participant.cost < .5;
                                 if (member.done) ++participant.runs;
                               }
                               EXPECT_LE(sum, 1 + 1e-9);
                             },
                         .member = &participant};
      executor.Submit(std::move(job));
    };
    std::vector<std::thread> callers;
    for (int caller = 0; caller < kCallers; ++caller) {
      callers.emplace_back([&, caller] {
        for (int n = caller; n < kCallers * kParticipants; n += kCallers) submit(n);
      });
    }
    for (std::thread& caller : callers) caller.join();
    for (Participant& participant : participants)
      EXPECT_TRUE(participant.outcome.Wait().status.ok());
  }
  for (const Participant& participant : participants) {
    EXPECT_EQ(participant.runs, 1);
    EXPECT_EQ(participant.outcome.calls(), 1);
  }
}

TEST(ExecutorTest, ReportsQueueAndComputeTime) {
  test::FakeClock clock;
  Event started, submitted;
  const Task task = [&](int, int64_t, int) { clock.Advance(milliseconds(5)); };
  const Task first_task = [&](int stage, int64_t n, int worker) {
    started.Set();
    submitted.Wait();
    task(stage, n, worker);
  };
  Executor executor(1, clock);
  Outcome first, second;
  executor.Submit(MakeJob(first_task, {1}, first.Callback()));
  started.Wait();
  executor.Submit(MakeJob(task, {2}, second.Callback()));
  submitted.Set();
  EXPECT_EQ(first.Wait().compute_time, milliseconds(5));
  EXPECT_EQ(second.Wait().queue_time, milliseconds(5));
  EXPECT_EQ(second.Wait().compute_time, milliseconds(10));
}

TEST(ExecutorTest, DestructionAbandonsJobsInFlightAndRunsEachDoneOnce) {
  constexpr int kJobs = 20;
  Event started;
  std::atomic<bool> ending{false};
  const Task task = [&](int, int64_t, int) {
    started.Set();
    while (!ending) std::this_thread::yield();
  };
  std::vector<Outcome> outcomes(kJobs);
  const SteadyClock clock;
  {
    Executor executor(2, clock);
    for (Outcome& outcome : outcomes) {
      executor.Submit(MakeJob(task, {1000000}, outcome.Callback()));
    }
    started.Wait();
    ending = true;
  }
  int given_up = 0;
  for (Outcome& outcome : outcomes) {
    EXPECT_EQ(outcome.calls(), 1);
    const absl::StatusCode code = outcome.Wait().status.code();
    EXPECT_TRUE(code == absl::StatusCode::kOk || code == absl::StatusCode::kUnavailable) << code;
    given_up += code == absl::StatusCode::kUnavailable;
  }
  EXPECT_GT(given_up, 0);
}

TEST(ExecutorTest, RunsEachJobOfManyThreadsOnce) {
  constexpr int kThreads = 3;
  constexpr int kCallers = 4;
  constexpr int kJobsPerCaller = 200;
  std::atomic<int64_t> tasks{0};
  const Task task = [&](int, int64_t, int) { ++tasks; };
  std::vector<Outcome> outcomes(kCallers * kJobsPerCaller);
  const SteadyClock clock;
  Executor executor(kThreads, clock);
  std::vector<std::thread> callers;
  for (int caller = 0; caller < kCallers; ++caller) {
    callers.emplace_back([&, caller] {
      for (int i = 0; i < kJobsPerCaller; ++i) {
        executor.Submit(MakeJob(task, {3, 2}, outcomes[caller * kJobsPerCaller + i].Callback()));
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  for (Outcome& outcome : outcomes) EXPECT_TRUE(outcome.Wait().status.ok());
  for (Outcome& outcome : outcomes) EXPECT_EQ(outcome.calls(), 1);
  EXPECT_EQ(tasks, kCallers * kJobsPerCaller * 5);
}

}  // namespace
}  // namespace rapt
