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
  void WaitForTheDue() {
    std::promise<void> rang;
    Alarm last(timer_, [&rang] { rang.set_value(); });
    clock_.Advance(std::chrono::nanoseconds(1));
    last.Set(clock_.Now());  // after alarms of the same time
    rang.get_future().wait();
  }

  test::FakeClock clock_;
  Timer timer_{clock_};
};

TEST_F(TimerTest, FiresDueAlarmsInOrder) {
  std::vector<int> rung;
  Alarm second(timer_, [&rung] { rung.push_back(2); });
  Alarm first(timer_, [&rung] { rung.push_back(1); });
  second.Set(clock_.Now() + seconds(20));
  first.Set(clock_.Now() + seconds(10));
  WaitForTheDue();
  EXPECT_TRUE(rung.empty());
  Advance(seconds(10));
  WaitForTheDue();
  EXPECT_EQ(rung, std::vector<int>({1}));
  Advance(seconds(10));
  WaitForTheDue();
  EXPECT_EQ(rung, std::vector<int>({1, 2}));
}

TEST_F(TimerTest, ACancelledAlarmDoesNotFire) {
  std::atomic<int> rung = 0;
  Alarm alarm(timer_, [&rung] { ++rung; });
  alarm.Set(clock_.Now() + seconds(1));
  alarm.Cancel();
  Advance(seconds(2));
  WaitForTheDue();
  EXPECT_EQ(rung, 0);
}

TEST_F(TimerTest, TheLastTimeSetCounts) {
  std::atomic<int> rung = 0;
  Alarm alarm(timer_, [&rung] { ++rung; });
  alarm.Set(clock_.Now() + seconds(1));
  alarm.Set(clock_.Now() + seconds(5));
  Advance(seconds(2));
  WaitForTheDue();
  EXPECT_EQ(rung, 0);
  alarm.SetNoLaterThan(clock_.Now() + seconds(100));
  alarm.SetNoLaterThan(clock_.Now() + seconds(1));
  Advance(seconds(1));
  WaitForTheDue();
  EXPECT_EQ(rung, 1);
}

TEST_F(TimerTest, AnAlarmMaySetItselfAgain) {
  std::atomic<int> rung = 0;
  Alarm alarm(timer_, [&] {
    if (++rung < 3) alarm.Set(clock_.Now());
  });
  alarm.Set(clock_.Now());
  while (rung < 3) std::this_thread::yield();
  WaitForTheDue();
  EXPECT_EQ(rung, 3);
}

TEST_F(TimerTest, CancelWaitsForAFiringAlarm) {
  std::promise<void> begun, go_on;
  std::atomic<bool> ended = false;
  Alarm alarm(timer_, [&] {
    begun.set_value();
    go_on.get_future().wait();
    ended = true;
  });
  alarm.Set(clock_.Now());
  begun.get_future().wait();
  std::thread canceller([&] {
    alarm.Cancel();
    EXPECT_TRUE(ended);
  });
  go_on.set_value();
  canceller.join();
}

TEST_F(TimerTest, CancelStopsAnAlarmThatSetsItselfAgain) {
  std::promise<void> begun, go_on;
  std::atomic<int> rung = 0;
  Alarm alarm(timer_, [&] {
    if (++rung > 1) return;
    begun.set_value();
    go_on.get_future().wait();
    alarm.Set(clock_.Now() + seconds(1));
  });
  alarm.Set(clock_.Now());
  begun.get_future().wait();
  std::thread canceller([&] { alarm.Cancel(); });
  go_on.set_value();
  canceller.join();
  Advance(seconds(2));
  WaitForTheDue();
  EXPECT_EQ(rung, 1);
}

}  // namespace
}  // namespace rapt
