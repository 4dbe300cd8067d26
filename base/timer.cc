#include "base/timer.h"

#include <algorithm>
#include <chrono>

namespace rapt {
namespace {

// A longer wait could overflow the sum that the condition variable computes.
constexpr std::chrono::hours kLongestWait{1};

}  // namespace

Timer::Timer(const Clock& clock) : clock_(clock), thread_([this] { Loop(); }) {}

Timer::~Timer() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  changed_.SignalAll();
  thread_.join();
}

void Timer::Wake() {
  MutexLock lock(mutex_);
  changed_.SignalAll();
}

void Timer::Loop() {
  MutexLock lock(mutex_);
  while (!stopping_) {
    if (due_.empty()) {
      wakes_at_ = Instant::max();
      changed_.Wait(mutex_);
      continue;
    }
    const auto [when, alarm] = *due_.begin();
    if (const Instant now = clock_.Now(); when > now) {
      wakes_at_ = when;
      changed_.WaitFor(mutex_, std::min<std::chrono::nanoseconds>(when - now, kLongestWait));
      continue;
    }
    wakes_at_ = Instant::min();
    due_.erase(due_.begin());
    alarm->when_ = Instant::max();
    firing_ = alarm;
    mutex_.Unlock();
    alarm->callback_();
    mutex_.Lock();
    firing_ = nullptr;
    fired_.SignalAll();
  }
}

void Timer::Set(Alarm& alarm, Instant when, bool only_if_earlier) {
  MutexLock lock(mutex_);
  if (only_if_earlier && alarm.when_ <= when) return;
  if (alarm.when_ != Instant::max()) due_.erase({alarm.when_, &alarm});
  alarm.when_ = when;
  if (when == Instant::max()) return;
  due_.insert({when, &alarm});
  // Waking the thread costs more than everything else here. Most alarms are cancelled long before
  // they are due and need no wakeup: the thread wakes for the earliest alarm set so far.
  if (when < wakes_at_) changed_.Signal();
}

void Timer::Cancel(Alarm& alarm) {
  MutexLock lock(mutex_);
  for (;;) {
    if (alarm.when_ != Instant::max()) due_.erase({alarm.when_, &alarm});
    alarm.when_ = Instant::max();
    if (firing_ != &alarm || thread_.get_id() == std::this_thread::get_id()) return;
    fired_.Wait(mutex_);  // the callback may set the alarm again
  }
}

}  // namespace rapt
