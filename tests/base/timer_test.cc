#include "base/timer.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <future>
#include <vector>

#include "tests/support/fake_clock.h"

namespace rapt {
namespace {

using std::chrono::seconds;

class TimerTest : public ::testing::Test {
 protected:
  void Advance(std::chrono::nanoseconds by) {
    clock_.Advance(by);
    timer_.Wake();
  }

  // Returns when all due alarms have fired.
  void WaitForDueAlarms() {
    std::promise<void> done;
    Alarm last(timer_, [&done] { done.set_value(); });
    clock_.Advance(std::chrono::nanoseconds(1));
    last.Set(clock_.Now());  // after alarms of the same time
    done.get_future().wait();
  }

  test::FakeClock clock_;
  Timer timer_{clock_};
};

TEST_F(TimerTest, FiresDueAlarmsInOrder) {
  std::vector<int> fired;
  Alarm second(timer_, [&fired] { fired.push_back(2); });
  Alarm first(timer_, [&fired] { fired.push_back(1); });
  second.Set(clock_.Now() + seconds(20));
  first.Set(clock_.Now() + seconds(10));
  WaitForDueAlarms();
  EXPECT_TRUE(fired.empty());
  Advance(seconds(10));
  WaitForDueAlarms();
  EXPECT_EQ(fired, std::vector<int>({1}));
  Advance(seconds(10));
  WaitForDueAlarms();
  EXPECT_EQ(fired, std::vector<int>({1, 2}));
}

TEST_F(TimerTest, ACancelledAlarmDoesNotFire) {
  std::atomic<int> fired = 0;
  Alarm alarm(timer_, [&fired] { ++fired; });
  alarm.Set(clock_.Now() + seconds(1));
  alarm.Cancel();
  Advance(seconds(2));
  WaitForDueAlarms();
  EXPECT_EQ(fired, 0);
}

TEST_F(TimerTest, TheLastTimeSetCounts) {
  std::atomic<int> fired = 0;
  Alarm alarm(timer_, [&fired] { ++fired; });
  alarm.Set(clock_.Now() + seconds(1));
  alarm.Set(clock_.Now() + seconds(5));
  Advance(seconds(2));
  WaitForDueAlarms();
  EXPECT_EQ(fired, 0);
  alarm.SetNoLaterThan(clock_.Now() + seconds(100));
  alarm.SetNoLaterThan(clock_.Now() + seconds(1));
  Advance(seconds(1));
  WaitForDueAlarms();
  EXPECT_EQ(fired, 1);
}

TEST_F(TimerTest, AnAlarmMaySetItselfAgain) {
  std::atomic<int> fired = 0;
  Alarm alarm(timer_, [&] {
    if (++fired < 3) alarm.Set(clock_.Now());
  });
  alarm.Set(clock_.Now());
  while (fired < 3) std::this_thread::yield();
  WaitForDueAlarms();
  EXPECT_EQ(fired, 3);
}

TEST_F(TimerTest, CancelWaitsForAFiringAlarm) {
  std::promise<void> begun, may_continue;
  std::atomic<bool> ended = false;
  Alarm alarm(timer_, [&] {
    begun.set_value();
    may_continue.get_future().wait();
    ended = true;
  });
  alarm.Set(clock_.Now());
  begun.get_future().wait();
  std::thread canceller([&] {
    alarm.Cancel();
    EXPECT_TRUE(ended);
  });
  may_continue.set_value();
  canceller.join();
}

TEST_F(TimerTest, CancelStopsAnAlarmThatSetsItselfAgain) {
  std::promise<void> begun, may_continue;
  std::atomic<int> fired = 0;
  Alarm alarm(timer_, [&] {
    if (++fired > 1) return;
    begun.set_value();
    may_continue.get_future().wait();
    alarm.Set(clock_.Now() + seconds(1));
  });
  alarm.Set(clock_.Now());
  begun.get_future().wait();
  std::thread canceller([&] { alarm.Cancel(); });
  may_continue.set_value();
  canceller.join();
  Advance(seconds(2));
  WaitForDueAlarms();
  EXPECT_EQ(fired, 1);
}

}  // namespace
}  // namespace rapt
