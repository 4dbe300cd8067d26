// Logs every slow call: its shape, stages and plan, but no tensor data.
#ifndef RAPT_SERVER_CALLS_SLOW_CALLS_H_
#define RAPT_SERVER_CALLS_SLOW_CALLS_H_

#include <chrono>

#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/log_limit.h"
#include "server/calls/call_report.h"

namespace rapt {

// Thread-safe. REQUIRES: the clock outlives this.
class SlowCalls {
 public:
  // Bounded so that logging does not slow down an overloaded server further.
  static constexpr int kLinesPerSecond = 10;

  // Logs calls that take `limit` or longer, at most kLinesPerSecond; 0: logs none.
  SlowCalls(std::chrono::nanoseconds limit, const Clock& clock)
      : limit_(limit), lines_(kLinesPerSecond, clock) {}

  void Note(absl::string_view method, const CallReport& report);

 private:
  const std::chrono::nanoseconds limit_;
  LogLimit lines_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_SLOW_CALLS_H_
