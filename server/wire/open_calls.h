// Counts the tensor calls of all protocols, from arrival until their answer has left.
#ifndef RAPT_SERVER_WIRE_OPEN_CALLS_H_
#define RAPT_SERVER_WIRE_OPEN_CALLS_H_

#include <chrono>
#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "server/base/mutex.h"

namespace rapt {

// Thread-safe.
class OpenCalls {
 public:
  void Enter();
  void Leave();
  int64_t count() const;
  // How many have left.
  int64_t served() const;

  // Blocks until none is open, or the time is over: then false.
  bool WaitUntilNone(std::chrono::nanoseconds timeout);

 private:
  mutable Mutex mutex_;
  CondVar none_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t served_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_OPEN_CALLS_H_
