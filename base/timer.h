// Alarms that fire on one thread, driven by an injected clock.
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

// Thread-safe. REQUIRES: outlives its alarms.
class Timer {
 public:
  explicit Timer(const Clock& clock);
  ~Timer();
  Timer(const Timer&) = delete;
  Timer& operator=(const Timer&) = delete;

  // Reads the clock again. For tests that advance a fake clock.
  void Wake();

 private:
  friend class Alarm;

  void Loop();
  void Set(Alarm& alarm, Instant when, bool only_if_earlier);
  void Cancel(Alarm& alarm);

  const Clock& clock_;
  Mutex mutex_;
  CondVar changed_;
  CondVar fired_;
  std::set<std::pair<Instant, Alarm*>> due_ ABSL_GUARDED_BY(mutex_);
  Instant wakes_at_ ABSL_GUARDED_BY(mutex_) = Instant::min();  // unless signalled; min: awake
  Alarm* firing_ ABSL_GUARDED_BY(mutex_) = nullptr;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

// Fires on the timer's thread once for each Set(), unless it is set again or cancelled before.
// The callback must be short. Thread-safe except for destruction.
class Alarm {
 public:
  Alarm(Timer& timer, absl::AnyInvocable<void()> callback)
      : timer_(timer), callback_(std::move(callback)) {}
  ~Alarm() { Cancel(); }
  Alarm(const Alarm&) = delete;
  Alarm& operator=(const Alarm&) = delete;

  // Replaces the time it was set for, if any.
  void Set(Instant when) { timer_.Set(*this, when, /*only_if_earlier=*/false); }
  // Has no effect if it is set for an earlier time.
  void SetNoLaterThan(Instant when) { timer_.Set(*this, when, /*only_if_earlier=*/true); }

  // On return the callback is neither pending nor running, unless the callback itself calls this.
  void Cancel() { timer_.Cancel(*this); }

 private:
  friend class Timer;

  Timer& timer_;
  absl::AnyInvocable<void()> callback_;
  Instant when_ = Instant::max();  // guarded by the timer's mutex; max: not set
};

}  // namespace rapt

#endif  // RAPT_BASE_TIMER_H_
