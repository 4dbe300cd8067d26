// Counts the tensor calls of all protocols, from arrival until their answer has left, and bounds
// them.
#ifndef RAPT_SERVER_CALLS_OPEN_CALLS_H_
#define RAPT_SERVER_CALLS_OPEN_CALLS_H_

#include <chrono>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "base/mutex.h"

namespace rapt {

// Thread-safe.
class OpenCalls {
 public:
  struct Limits {
    int64_t calls = 0;
    int64_t calls_per_caller = 0;
  };

  // `on_change` is called, on any thread and outside the lock, whenever places() has changed.
  explicit OpenCalls(
      Limits limits, std::function<void()> on_change = [] {})
      : limits_(limits), on_change_(std::move(on_change)) {}

  // ResourceExhausted, with the limit, where the server or this caller has too many open; then
  // there is nothing to leave.
  absl::Status Enter(const std::string& caller);
  void Leave(const std::string& caller);

  // One that has entered rests while there is nothing to wait for, as a stream between its
  // requests: it keeps its place, but is no open call until it wakes.
  void Rest();
  void Wake();
  void LeaveResting(const std::string& caller);

  const Limits& limits() const { return limits_; }
  // Of open calls.
  int64_t count() const;
  // Of all that have entered.
  int64_t places() const;
  // How many have left, or were woken.
  int64_t served() const;

  // Blocks until no call is open, or the time is over: then false.
  bool WaitUntilNone(std::chrono::nanoseconds timeout);

 private:
  absl::Status Count(const std::string& caller);
  void Close() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const std::string& caller) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Limits limits_;
  const std::function<void()> on_change_;
  mutable Mutex mutex_;
  CondVar none_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t resting_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t served_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, int64_t> by_caller_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_OPEN_CALLS_H_
