// What a person sees while a load runs.
#ifndef RAPT_CLIENT_LOAD_LIVE_VIEW_H_
#define RAPT_CLIENT_LOAD_LIVE_VIEW_H_

#include <chrono>
#include <optional>
#include <string>

#include "client/load/run.h"

namespace rapt::load {

// "[=====>     ]  42%  123.4/s  p50 1.23 ms  p99 4.56 ms  0 failed  4 in flight"; without a
// duration no bar. Totals are those of `stretch` alone.
std::string ProgressLine(const TimedStretch& stretch,
                         std::optional<std::chrono::nanoseconds> duration);

// One line of a terminal on standard error, written anew; elsewhere nothing at all. At most ten
// times a second. Thread-compatible.
class LiveView {
 public:
  LiveView(bool is_wanted, std::optional<std::chrono::nanoseconds> duration);
  ~LiveView();  // ends the line
  LiveView(const LiveView&) = delete;
  LiveView& operator=(const LiveView&) = delete;

  void Show(const TimedStretch& stretch);

 private:
  const bool is_shown_;
  const std::optional<std::chrono::nanoseconds> duration_;
};

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_LIVE_VIEW_H_
