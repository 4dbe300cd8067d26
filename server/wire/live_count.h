#ifndef RAPT_SERVER_WIRE_LIVE_COUNT_H_
#define RAPT_SERVER_WIRE_LIVE_COUNT_H_

#include <chrono>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"

namespace rapt {

// Counts live objects, so that their dependencies can be kept until they are gone. Thread-safe.
class LiveCount {
 public:
  // Counts one object.
  class Place {
   public:
    explicit Place(LiveCount& count) : owner_(count) {
      MutexLock lock(owner_.mutex_);
      ++owner_.count_;
    }
    ~Place() {
      MutexLock lock(owner_.mutex_);
      if (--owner_.count_ == 0) owner_.none_.SignalAll();
    }
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

   private:
    LiveCount& owner_;
  };

  void WaitUntilNone() {
    MutexLock lock(mutex_);
    while (count_ > 0) none_.Wait(mutex_);
  }
  // Returns false on timeout.
  bool WaitUntilNone(std::chrono::nanoseconds timeout) {
    MutexLock lock(mutex_);
    if (count_ > 0) none_.WaitFor(mutex_, timeout);
    return count_ == 0;
  }

 private:
  Mutex mutex_;
  CondVar none_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_LIVE_COUNT_H_
