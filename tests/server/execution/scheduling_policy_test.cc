#include "server/execution/scheduling_policy.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <deque>
#include <string>
#include <utility>
#include <vector>

#include "server/request.h"
#include "tests/support/fake_clock.h"

namespace rapt {
namespace {

using std::chrono::milliseconds;
using Entry = SchedulingPolicy::Entry;

constexpr std::chrono::nanoseconds kQuantum = SchedulingPolicy::kQuantum;
constexpr std::chrono::nanoseconds kStep = SchedulingPolicy::kPriorityStep;

// Simulates a single thread that runs one quantum of a job at a time.
class SchedulingPolicyTest : public ::testing::Test {
 protected:
  Entry* Add(Job job = {}) {
    Entry* const entry = &entries_.emplace_back(std::move(job), clock_.Now());
    policy_.Add(entry);
    return entry;
  }

  static Job Priority(uint64_t priority) {
    Job job;
    job.priority = priority;
    return job;
  }
  static Job Cost(double task_cost) {
    Job job;
    job.task_cost = task_cost;
    return job;
  }
  static Job InGroup(std::string name, double batch_cost = .25) {
    Job job;
    job.batch_group = {.name = std::move(name), .batch_cost = batch_cost};
    return job;
  }

  static bool IsAlive(const Entry& entry) {
    return entry.job.cancelled == nullptr || !entry.job.cancelled->load();
  }

  // The next job, which then computes for `time`.
  Entry* RunNext(std::chrono::nanoseconds time = kQuantum) {
    Entry* const entry = policy_.Take(/*may_batch=*/false, IsAlive).front();
    Run(entry, time);
    return entry;
  }
  void Run(Entry* entry, std::chrono::nanoseconds time = kQuantum) {
    const Instant begin = clock_.Now();
    clock_.Advance(time);
    policy_.Charge(entry, begin);
  }
  void End(Entry* entry) {
    policy_.Pause(entry);
    policy_.Remove(entry);
  }

  // The entries of the next batch, numbered in order of Add().
  std::vector<int> TakeBatch() {
    std::vector<int> numbers;
    for (const Entry* taken : policy_.Take(/*may_batch=*/true, IsAlive)) {
      const auto is_taken = [taken](const Entry& entry) { return &entry == taken; };
      numbers.push_back(static_cast<int>(std::find_if(entries_.begin(), entries_.end(), is_taken) -
                                         entries_.begin()));
    }
    return numbers;
  }

  test::FakeClock clock_;
  SchedulingPolicy policy_{clock_};
  std::deque<Entry> entries_;  // addresses stay valid
};

TEST_F(SchedulingPolicyTest, TakesJobsOfOnePriorityInOrderOfArrival) {
  for (int n = 0; n < 3; ++n) Add();
  for (Entry& entry : entries_) {
    EXPECT_EQ(RunNext(), &entry);
    End(&entry);
  }
  EXPECT_TRUE(policy_.empty());
}

TEST_F(SchedulingPolicyTest, TheJobWithTheLeastComputeTimeIsNext) {
  Entry* const a = Add();
  Entry* const b = Add();
  EXPECT_EQ(RunNext(3 * kQuantum), a);
  for (int n = 0; n < 3; ++n) EXPECT_EQ(RunNext(), b) << n;
  EXPECT_EQ(RunNext(), a) << "equal again; it was submitted first";
}

TEST_F(SchedulingPolicyTest, ANewJobStartsAtTheCurrentVirtualTime) {
  Entry* const old_job = Add();
  for (int n = 0; n < 100; ++n) RunNext();
  Entry* const new_job = Add();
  EXPECT_EQ(RunNext(), old_job) << "it has received no more than its share";
  int of_new = 0;
  for (int n = 0; n < 20; ++n) of_new += RunNext() == new_job;
  EXPECT_EQ(of_new, 10);
}

TEST_F(SchedulingPolicyTest, AJobWithoutTasksIsNotTaken) {
  Entry* const a = Add();
  Entry* const b = Add();
  policy_.Pause(a);
  EXPECT_EQ(RunNext(), b);
  EXPECT_EQ(RunNext(), b);
  policy_.Resume(a);
  EXPECT_EQ(RunNext(), a);
}

TEST_F(SchedulingPolicyTest, ChargesAJobThatHasNoTasksLeft) {
  Entry* const a = Add();
  Entry* const b = Add();
  EXPECT_EQ(policy_.Take(false, IsAlive).front(), a);
  policy_.Pause(a);
  Run(a, 5 * kQuantum);
  policy_.Resume(a);
  for (int n = 0; n < 5; ++n) EXPECT_EQ(RunNext(), b) << n;
}

TEST_F(SchedulingPolicyTest, AMoreUrgentJobIsTakenFirst) {
  Entry* const lazy = Add(Priority(kDefaultPriority + 1));
  Entry* const unset = Add(Priority(0));
  Entry* const by_name = Add(Priority(kDefaultPriority));
  Entry* const urgent = Add(Priority(kDefaultPriority - 1));
  Entry* const most_urgent = Add(Priority(1));
  for (Entry* const entry : {most_urgent, urgent, unset, by_name, lazy}) {
    EXPECT_EQ(RunNext(), entry);
    End(entry);
  }
}

TEST_F(SchedulingPolicyTest, PrioritiesBeyondTheLeastUrgentAreClamped) {
  Entry* const a = Add(Priority(~uint64_t{0}));
  Entry* const b = Add(Priority(kLowestPriority));
  EXPECT_EQ(RunNext(), a);
  EXPECT_EQ(RunNext(), b);
}

TEST_F(SchedulingPolicyTest, AnUrgentJobRunsForItsHeadStart) {
  Entry* const normal = Add();
  Entry* const urgent = Add(Priority(kDefaultPriority - 1));
  for (int n = 0; n < kStep / kQuantum; ++n) EXPECT_EQ(RunNext(), urgent) << n;
  int of_normal = 0;
  for (int n = 0; n < 20; ++n) of_normal += RunNext() == normal;
  EXPECT_EQ(of_normal, 10) << "then both have the same share";
}

TEST_F(SchedulingPolicyTest, AConsumedHeadStartDoesNotDelayNewJobs) {
  Add();
  Entry* const urgent = Add(Priority(1));
  constexpr auto kHeadStart = 7 * kStep;
  for (auto used = 0 * kQuantum; used < kHeadStart; used += kQuantum) EXPECT_EQ(RunNext(), urgent);
  for (int n = 0; n < 4; ++n) RunNext();
  Entry* const added = Add();
  const Instant begin = clock_.Now();
  while (RunNext() != added && clock_.Now() - begin < 10 * kHeadStart) {
  }
  EXPECT_LE(clock_.Now() - begin, kHeadStart + 4 * kQuantum);
}

TEST_F(SchedulingPolicyTest, ALessUrgentJobStaysBehindAfterRunningAlone) {
  Entry* const lazy = Add(Priority(kLowestPriority));
  for (int n = 0; n < 100; ++n) EXPECT_EQ(RunNext(), lazy);
  Entry* const normal = Add();
  for (int n = 0; n < 7 * kStep / kQuantum; ++n) EXPECT_EQ(RunNext(), normal) << n;
}

// The bound that docs/tuning.md states: the difference of the head starts, times the jobs in
// flight.
TEST_F(SchedulingPolicyTest, ASteadyFlowOfUrgentJobsDoesNotStarveOthers) {
  Entry* const normal = Add();
  Entry* urgent = Add(Priority(1));
  std::chrono::nanoseconds waited{0};
  while (RunNext() != normal) {
    End(urgent);
    urgent = Add(Priority(1));
    waited += kQuantum;
    ASSERT_LE(waited, 2 * 7 * kStep);
  }
  EXPECT_GE(waited, 7 * kStep);
  // Once it has aged, it receives its share although every other job is new and more urgent.
  int of_normal = 0;
  for (int n = 0; n < 100; ++n) {
    if (RunNext() == normal) {
      ++of_normal;
    } else {
      End(urgent);
      urgent = Add(Priority(1));
    }
  }
  EXPECT_GE(of_normal, 40);
}

TEST_F(SchedulingPolicyTest, AMuchShorterTaskInterruptsALongOne) {
  Entry* const running = Add(Cost(100));
  Entry* const as_long = Add(Cost(26));
  Entry* const much_shorter = Add(Cost(25));
  ASSERT_EQ(RunNext(), running);
  EXPECT_EQ(policy_.TakeInterrupting(*running), much_shorter);
  End(much_shorter);
  EXPECT_EQ(policy_.TakeInterrupting(*running), nullptr);
  EXPECT_EQ(RunNext(), as_long) << "it waits for the end of the task";
}

TEST_F(SchedulingPolicyTest, AJobThatReceivedMoreTimeInterruptsNothing) {
  Entry* const short_job = Add(Cost(1));
  Entry* const running = Add(Cost(100));
  ASSERT_EQ(RunNext(2 * kQuantum), short_job);
  ASSERT_EQ(RunNext(), running);
  EXPECT_EQ(policy_.TakeInterrupting(*running), nullptr);
  Run(running, 2 * kQuantum);
  EXPECT_EQ(policy_.TakeInterrupting(*running), short_job);
}

TEST_F(SchedulingPolicyTest, ALessUrgentJobDoesNotInterruptAMoreUrgentOne) {
  Job urgent = Cost(100);
  urgent.priority = 1;
  Entry* const running = Add(std::move(urgent));
  ASSERT_EQ(RunNext(), running);
  Entry* const short_job = Add(Cost(1));
  EXPECT_EQ(policy_.TakeInterrupting(*running), nullptr);
  Run(running, 8 * kStep);
  EXPECT_EQ(policy_.TakeInterrupting(*running), short_job) << "it has aged";
}

TEST_F(SchedulingPolicyTest, WaitingJobsOfOneGroupAreTakenTogether) {
  for (const char* group : {"a", "b", "", "a", "b", "", "a"}) Add(InGroup(group));
  EXPECT_EQ(TakeBatch(), (std::vector<int>{0, 3, 6}));
  EXPECT_EQ(TakeBatch(), (std::vector<int>{1, 4}));
  EXPECT_EQ(TakeBatch(), (std::vector<int>{2}));
}

TEST_F(SchedulingPolicyTest, NothingIsBatchedUnlessAllowed) {
  for (int n = 0; n < 2; ++n) Add(InGroup("a"));
  EXPECT_EQ(policy_.Take(/*may_batch=*/false, IsAlive).size(), 1u);
}

TEST_F(SchedulingPolicyTest, ABatchRespectsTheCapacityOfARun) {
  for (const double cost : {.5, .25, .5, .25, .5, 1., .125}) Add(InGroup("a", cost));
  EXPECT_EQ(TakeBatch(), (std::vector<int>{0, 1, 3}));
  EXPECT_EQ(TakeBatch(), (std::vector<int>{2, 4}));
  EXPECT_EQ(TakeBatch(), (std::vector<int>{5}));
}

TEST_F(SchedulingPolicyTest, ABatchTakesTheMostUrgentFirst) {
  for (const uint64_t priority : {9, 1, 8, 2}) {
    Job job = InGroup("a", .5);
    job.priority = priority;
    Add(std::move(job));
  }
  EXPECT_EQ(TakeBatch(), (std::vector<int>{1, 3}));
  EXPECT_EQ(TakeBatch(), (std::vector<int>{2, 0}));
}

TEST_F(SchedulingPolicyTest, CancelledJobsDoNotJoinABatch) {
  const std::atomic<bool> cancelled{true};
  for (int n = 0; n < 4; ++n) {
    Job job = InGroup("a");
    if (n == 1) job.cancelled = &cancelled;
    Add(std::move(job));
  }
  EXPECT_EQ(TakeBatch(), (std::vector<int>{0, 2, 3}));
}

TEST_F(SchedulingPolicyTest, ASkippedJobIsTakenAlone) {
  for (int n = 0; n < 3; ++n) Add(InGroup("a"));
  ASSERT_EQ(TakeBatch(), (std::vector<int>{0, 1, 2}));
  EXPECT_TRUE(policy_.empty()) << "a batch's jobs are paused";
  for (Entry& entry : entries_) policy_.Resume(&entry);
  Add(InGroup("a"));
  EXPECT_EQ(TakeBatch(), (std::vector<int>{0}));
}

TEST_F(SchedulingPolicyTest, ADecisionLooksAtABoundedNumberOfJobs) {
  Add(InGroup("a", .5));
  for (int n = 0; n < SchedulingPolicy::kMaxSkipped; ++n) Add(InGroup("a", .75));
  Add(InGroup("a", .5));
  EXPECT_EQ(TakeBatch(), (std::vector<int>{0}));
}

TEST_F(SchedulingPolicyTest, ABatchAdvancesVirtualTimeOnce) {
  for (int n = 0; n < 4; ++n) Add(InGroup("a"));
  ASSERT_EQ(TakeBatch().size(), 4u);
  const Instant begin = clock_.Now();
  clock_.Advance(8 * kQuantum);
  policy_.ChargeBatch(begin);
  Entry* const new_job = Add();
  for (int n = 0; n < 4; ++n) policy_.Resume(&entries_[n]);
  for (int n = 0; n < 4; ++n) {
    EXPECT_EQ(RunNext(4 * kQuantum), &entries_[n]) << "what was waiting is 2 quanta behind";
  }
  EXPECT_EQ(RunNext(), new_job);
}

TEST_F(SchedulingPolicyTest, CountsWaitingJobs) {
  EXPECT_EQ(policy_.waiting().depth, 0);
  Add();
  clock_.Advance(milliseconds(3));
  Add();
  clock_.Advance(milliseconds(1));
  EXPECT_EQ(policy_.waiting().depth, 2);
  EXPECT_EQ(policy_.waiting().oldest_age, milliseconds(4));
  RunNext(milliseconds(1));
  EXPECT_EQ(policy_.waiting().depth, 1);
  EXPECT_EQ(policy_.waiting().oldest_age, milliseconds(2));
}

}  // namespace
}  // namespace rapt
