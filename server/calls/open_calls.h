// Counts and bounds the open tensor calls of all protocols, from arrival until the response is
// sent.
#ifndef RAPT_SERVER_CALLS_OPEN_CALLS_H_
#define RAPT_SERVER_CALLS_OPEN_CALLS_H_

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "base/metric_sink.h"
#include "base/mutex.h"

namespace rapt {

// Thread-safe.
class OpenCalls {
 public:
  struct Limits {
    int64_t calls = 0;
    int64_t calls_per_caller = 0;
  };

  explicit OpenCalls(Limits limits) : limits_(limits) {}

  // Returns ResourceExhausted, with the limit, if the server or this caller has too many open
  // calls; Leave() must not be called then.
  absl::Status Enter(const std::string& caller);
  void Leave(const std::string& caller);

  // An entered call may become idle, such as a stream between its requests: it keeps its place but
  // does not count as open until it becomes active again.
  void MarkIdle();
  void MarkActive();
  void LeaveIdle(const std::string& caller);

  const Limits& limits() const { return limits_; }
  // Returns the number of open calls.
  int64_t count() const;
  // Returns the number of open and idle calls.
  int64_t places() const;
  // Returns the number of calls that have left or become active.
  int64_t served() const;
  void ExportTo(MetricSink& sink) const;

  // Blocks until no call is open. Returns false on timeout.
  bool WaitUntilNone(std::chrono::nanoseconds timeout);

 private:
  void Close() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Forget(const std::string& caller) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Limits limits_;
  mutable Mutex mutex_;
  CondVar all_closed_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t idle_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t served_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<std::string, int64_t> by_caller_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_OPEN_CALLS_H_
