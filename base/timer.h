// Alarms on one thread, by an injected clock.
#ifndef RAPT_BASE_TIMER_H_
#define RAPT_BASE_TIMER_H_

#include <set>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace rapt {

class Alarm;

// Thread-safe. Outlives its alarms.
class Timer {
 public:
  explicit Timer(const Clock& clock);
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Looks at the clock again: for clocks that are moved by hand.
  void Wake();

 private:
  friend class Alarm;

  void Loop();
  void Set(Alarm& alarm, Instant when, bool only_if_earlier);
  void Cancel(Alarm& alarm);

  const Clock& clock_;
  Mutex mutex_;
  CondVar changed_;
  CondVar rang_;
  std::set<std::pair<Instant, Alarm*>> due_ ABSL_GUARDED_BY(mutex_);
  Instant wakes_at_ ABSL_GUARDED_BY(mutex_) = Instant::min();  // by itself; min: it is awake
  Alarm* ringing_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// Rings on the timer's thread, once for each time that it is set, unless it is set anew or
// cancelled before. What it does there must be short. Thread-safe, but for its destruction.
class Alarm {
 public:
  Alarm(Timer& timer, absl::AnyInvocable<void()> ring) : timer_(timer), ring_(std::move(ring)) {}
  ~Alarm() { Cancel(); }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  // Instead of the time it was set for.
  void Set(Instant when) { timer_.Set(*this, when, /*only_if_earlier=*/false); }
  // Unless it is set for an earlier time.
  void SetNoLaterThan(Instant when) { timer_.Set(*this, when, /*only_if_earlier=*/true); }

  // Afterwards it neither rings nor is it ringing; but an alarm may cancel itself.
  void Cancel() { timer_.Cancel(*this); }

 private:
  friend class Timer;

  Timer& timer_;
  absl::AnyInvocable<void()> ring_;
  Instant when_ = Instant::max();  // guarded by the timer's mutex; max: not set
};

}  // namespace rapt

#endif  // RAPT_BASE_TIMER_H_
