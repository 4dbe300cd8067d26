// Logs every slow call: its shape, stages and plan, but no tensor data.
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

// Thread-safe. REQUIRES: the clock outlives this.
class SlowCalls {
 public:
  // Bounded so that logging does not slow down an overloaded server further.
  static constexpr int kLinesPerSecond = 10;

  // Logs calls that take `limit` or longer, at most kLinesPerSecond; 0: logs none.
  SlowCalls(std::chrono::nanoseconds limit, const Clock& clock) : limit_(limit), clock_(clock) {}

  void Note(absl::string_view method, const CallReport& report);

 private:
  // Returns how many calls were left out since the last line, or nullopt to leave out this one,
  // too.
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
