// Counts the tensor calls of all protocols, from arrival until their answer has left, and bounds
// them.
#ifndef RAPT_SERVER_WIRE_OPEN_CALLS_H_
#define RAPT_SERVER_WIRE_OPEN_CALLS_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "server/base/mutex.h"

namespace rapt {

// Thread-safe.
class OpenCalls {
 public:
  struct Limits {
    int64_t calls = 0;
    int64_t calls_per_caller = 0;
  };

  explicit OpenCalls(Limits limits) : limits_(limits) {}

  // ResourceExhausted, with the limit, where the server or this caller has too many open; then
  // there is nothing to leave.
  absl::Status Enter(const std::string& caller);
  void Leave(const std::string& caller);
  const Limits& limits() const { return limits_; }
  int64_t count() const;
  // How many have left.
  int64_t served() const;

  // Blocks until none is open, or the time is over: then false.
  bool WaitUntilNone(std::chrono::nanoseconds timeout);

 private:
  const Limits limits_;
  mutable Mutex mutex_;
  CondVar none_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t served_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, int64_t> by_caller_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_OPEN_CALLS_H_
