// Readiness, on a fake clock.
#include "server/readiness.h"

#include <gtest/gtest.h>

#include <atomic>
#include <barrier>
#include <chrono>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/backend.h"
#include "tests/support/fake_clock.h"

namespace rapt {
namespace {

using std::chrono::seconds;

constexpr int kThreads = 2;
constexpr seconds kStallTimeout{10};
constexpr seconds kInterval{1};

// Forwards to a real backend until told to hang or to omit its results.
class FaultyBackend final : public Backend {
 public:
  explicit FaultyBackend(const Backend& real) : real_(real) {}

  absl::string_view name() const override { return "faulty"; }
  absl::Status Supports(const Problem&) const override { return absl::OkStatus(); }
  void PlanTasks(Plan&) const override {}
  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int stage,
               int64_t task, int worker, const Checkpoint& checkpoint) const override {
    hangs_.wait(true);
    if (!forgets_) real_.RunTask(plan, arguments, workspace, stage, task, worker, checkpoint);
    ++ran_;
  }

  void Hang() { hangs_ = true; }
  void Continue() {
    hangs_ = false;
    hangs_.notify_all();
  }
  void Forget(bool forgets) { forgets_ = forgets; }
  int64_t ran() const { return ran_; }  // tasks

 private:
  const Backend& real_;
  std::atomic<bool> hangs_{false};
  std::atomic<bool> forgets_{false};
  mutable std::atomic<int64_t> ran_{0};
};

class ReadinessTest : public ::testing::Test {
 protected:
  ReadinessTest() {
    plan_ = PlanCanary({.threads = kThreads}).value();
    backend_ = std::make_unique<FaultyBackend>(*plan_.routing.backend);
    plan_.routing.backend = backend_.get();
    readiness_ =
        std::make_unique<Readiness>(plan_, kStallTimeout, PostToWire(), executor_, timer_, clock_);
  }

  // Keeps the function while the wire hangs.
  Readiness::PostToWire PostToWire() {
    return [this](absl::AnyInvocable<void()> run) {
      if (!wire_hangs_) return run();
      posted_.push_back(std::move(run));
    };
  }

  absl::Status Start() {
    return readiness_->Start([this](bool ready) { reported_.push_back(ready); });
  }

  void Advance(std::chrono::nanoseconds by) {
    clock_.Advance(by);
    timer_.Wake();
    // Once a later alarm has run, all due alarms have.
    std::promise<void> rang;
    Alarm last(timer_, [&rang] { rang.set_value(); });
    clock_.Advance(std::chrono::nanoseconds(1));
    last.Set(clock_.Now());
    rang.get_future().wait();
  }

  // A barrier job of all threads: earlier jobs have ended when it returns.
  void WaitForThreads() {
    std::barrier meeting(kThreads);
    std::promise<void> done;
    Job job;
    job.stages = {kThreads};
    job.run_task = [&meeting](int, int64_t, int, const Checkpoint&) { meeting.arrive_and_wait(); };
    job.done = [&done](const JobReport&) { done.set_value(); };
    executor_.Submit(std::move(job));
    done.get_future().wait();
  }

  // Advances the clock until readiness is `ready`. Returns how long that took.
  seconds AdvanceUntil(bool ready) {
    seconds passed{0};
    while (readiness_->is_ready() != ready) {
      Advance(kInterval);
      passed += kInterval;
    }
    return passed;
  }

  test::FakeClock clock_;
  Timer timer_{clock_};
  // While the clock stands still, a thread runs a job to its end.
  test::FakeClock frozen_clock_;
  Executor executor_{kThreads, frozen_clock_};
  Plan plan_;
  std::unique_ptr<FaultyBackend> backend_;
  std::atomic<bool> wire_hangs_{false};
  std::vector<absl::AnyInvocable<void()>> posted_;  // used between and in timer callbacks
  std::vector<bool> reported_;                      // written in Start() and on the timer's thread
  std::unique_ptr<Readiness> readiness_;
};

TEST_F(ReadinessTest, IsReadyAfterTheFirstCanary) {
  EXPECT_FALSE(readiness_->is_ready());
  ASSERT_TRUE(Start().ok());
  EXPECT_TRUE(readiness_->is_ready());
  for (int n = 0; n < 100; ++n) {
    Advance(kInterval);
    EXPECT_TRUE(readiness_->is_ready());
    WaitForThreads();
  }
  EXPECT_EQ(reported_, std::vector<bool>({true}));
  EXPECT_GE(backend_->ran(), 100) << "the canary must be repeated";
}

TEST_F(ReadinessTest, IsNotReadyWhileTheThreadsHang) {
  ASSERT_TRUE(Start().ok());
  backend_->Hang();
  const seconds noticed = AdvanceUntil(false);
  EXPECT_GE(noticed, kStallTimeout);
  EXPECT_LE(noticed, kStallTimeout + 3 * kInterval);
  EXPECT_EQ(reported_, std::vector<bool>({true, false}));
  Advance(seconds(3600));
  EXPECT_FALSE(readiness_->is_ready());
  backend_->Continue();
  AdvanceUntil(true);
  EXPECT_EQ(reported_, std::vector<bool>({true, false, true}));
}

TEST_F(ReadinessTest, StaysReadyWhileOtherWorkProgresses) {
  ASSERT_TRUE(Start().ok());
  std::atomic<int64_t> allowed{0};
  std::promise<void> done;
  Job job;
  job.stages = {1'000'000};
  job.run_task = [&allowed](int, int64_t task, int, const Checkpoint&) {
    for (int64_t now = allowed; now <= task; now = allowed) allowed.wait(now);
  };
  job.done = [&done](const JobReport&) { done.set_value(); };
  executor_.Submit(std::move(job));  // occupies both threads
  while (executor_.busy_threads() < kThreads) std::this_thread::yield();
  for (int n = 0; n < 100; ++n) {
    const int64_t ended = executor_.ended_tasks();
    ++allowed;
    allowed.notify_all();
    while (executor_.ended_tasks() == ended) std::this_thread::yield();
    Advance(kInterval);
    EXPECT_TRUE(readiness_->is_ready()) << n;
  }
  EXPECT_EQ(executor_.waiting().depth, 1) << "the canary waited all the time";
  AdvanceUntil(false);  // no task progresses any more
  allowed = 1'000'000;
  allowed.notify_all();
  done.get_future().wait();
  AdvanceUntil(true);
}

TEST_F(ReadinessTest, IsNotReadyAfterAWrongCanary) {
  ASSERT_TRUE(Start().ok());
  backend_->Forget(true);
  AdvanceUntil(false);
  backend_->Forget(false);
  AdvanceUntil(true);
  EXPECT_EQ(reported_, std::vector<bool>({true, false, true}));
}

TEST_F(ReadinessTest, StartFailsIfTheFirstCanaryIsWrong) {
  backend_->Forget(true);
  EXPECT_EQ(Start().code(), absl::StatusCode::kInternal);
  EXPECT_FALSE(readiness_->is_ready());
  EXPECT_TRUE(reported_.empty());
}

TEST_F(ReadinessTest, AStoppedProcessHasNotHung) {
  ASSERT_TRUE(Start().ok());
  backend_->Hang();
  Advance(kInterval);
  while (executor_.busy_threads() == 0) std::this_thread::yield();
  Advance(seconds(3600));
  EXPECT_TRUE(readiness_->is_ready());
  backend_->Continue();
}

TEST_F(ReadinessTest, StaysNotReadyOnceWithdrawn) {
  ASSERT_TRUE(Start().ok());
  readiness_->Withdraw();
  EXPECT_FALSE(readiness_->is_ready());
  for (int n = 0; n < 20; ++n) Advance(kInterval);
  EXPECT_FALSE(readiness_->is_ready());
  EXPECT_EQ(reported_, std::vector<bool>({true})) << "Withdraw() is not reported";
}

// Tasks that end show that the compute threads work, not that calls arrive.
TEST_F(ReadinessTest, IsNotReadyWhileTheWireHangsAlthoughTasksEnd) {
  ASSERT_TRUE(Start().ok());
  wire_hangs_ = true;
  seconds passed{0};
  for (; readiness_->is_ready(); passed += kInterval) {
    WaitForThreads();
    Advance(kInterval);
  }
  EXPECT_GE(passed, kStallTimeout);
  EXPECT_LE(passed, kStallTimeout + 3 * kInterval);
  ASSERT_EQ(posted_.size(), 1u);
  wire_hangs_ = false;
  posted_[0]();
  AdvanceUntil(true);
  EXPECT_EQ(reported_, std::vector<bool>({true, false, true}));
}

TEST(CanaryTest, EveryBackendAndInstructionSetComputesIt) {
  test::FakeClock clock;
  Timer timer(clock);
  Executor executor(kThreads, clock);
  for (const Backend* backend : BuiltInBackends()) {
    if (!backend->Available().ok()) continue;
    std::vector<std::string> sets = {"auto"};
    for (const InstructionSet& set : backend->instruction_sets()) {
      if (set.available) sets.emplace_back(set.name);
    }
    for (const std::string& isa : sets) {
      const absl::StatusOr<Plan> plan =
          PlanCanary({.backend = std::string(backend->name()), .isa = isa, .threads = kThreads});
      ASSERT_TRUE(plan.ok()) << plan.status();
      Readiness readiness(
          *plan, kStallTimeout, [](absl::AnyInvocable<void()> run) { run(); }, executor, timer,
          clock);
      EXPECT_TRUE(readiness.Start([](bool) {}).ok()) << plan->Describe();
    }
  }
}

}  // namespace
}  // namespace rapt
