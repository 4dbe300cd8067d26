// A line in the log for every call that takes long: its shape, its stages, its plan, and nothing of
// what its tensors hold.
#ifndef RAPT_SERVER_CALLS_SLOW_CALLS_H_
#define RAPT_SERVER_CALLS_SLOW_CALLS_H_

#include <chrono>
#include <cstdint>
#include <optional>

#include "absl/base/thread_annotations.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "server/calls/call_report.h"

namespace rapt {

// Thread-safe. The clock outlives it.
class SlowCalls {
 public:
  // Where all calls are slow, the log is not what makes them slower still.
  static constexpr int kLinesPerSecond = 10;

  // Calls of `limit` or longer are logged, at most kLinesPerSecond; 0: none is.
  SlowCalls(std::chrono::nanoseconds limit, const Clock& clock) : limit_(limit), clock_(clock) {}

  void Note(absl::string_view method, const CallReport& report);

 private:
  // How many were left out since the last line; nothing where this one is to be left out, too.
  std::optional<int64_t> TakeTurn();

  const std::chrono::nanoseconds limit_;
  const Clock& clock_;
  Mutex mutex_;
  Instant second_began_ ABSL_GUARDED_BY(mutex_);
  int lines_ ABSL_GUARDED_BY(mutex_) = 0;  // of this second
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_SLOW_CALLS_H_
