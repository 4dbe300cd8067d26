// Progress display while a load runs.
#ifndef RAPT_CLIENT_LOAD_LIVE_VIEW_H_
#define RAPT_CLIENT_LOAD_LIVE_VIEW_H_

#include <chrono>
#include <optional>
#include <string>

#include "client/load/run.h"

namespace rapt::load {

// Returns "[=====>     ]  42%  123.4/s  p50 1.23 ms  p99 4.56 ms  0 failed  4 in flight", with the
// figures of `interval`. Shows seconds instead of the bar if there is no duration.
std::string ProgressLine(const TimedInterval& interval,
                         std::optional<std::chrono::nanoseconds> duration);

// One line on standard error, redrawn in place. Prints nothing if standard error is not a terminal.
// Thread-compatible.
class LiveView {
 public:
  LiveView(bool is_enabled, std::optional<std::chrono::nanoseconds> duration);
  ~LiveView();  // erases the line
  LiveView(const LiveView&) = delete;
  LiveView& operator=(const LiveView&) = delete;

  void Show(const TimedInterval& interval);

 private:
  const bool is_shown_;
  const std::optional<std::chrono::nanoseconds> duration_;
};

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_LIVE_VIEW_H_
