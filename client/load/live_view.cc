#include "client/load/live_view.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>

#include "absl/strings/str_format.h"
#include "client/load/result.h"

namespace rapt::load {
namespace {

using Seconds = std::chrono::duration<double>;

constexpr int kBarWidth = 20;

std::string Bar(double share) {
  const int full = static_cast<int>(share * kBarWidth);
  std::string bar(static_cast<size_t>(full), '=');
  if (full < kBarWidth) bar += '>';
  bar.resize(kBarWidth, ' ');
  return absl::StrFormat("[%s] %3.0f%%", bar, share * 100);
}

}  // namespace

std::string ProgressLine(const TimedInterval& interval,
                         std::optional<std::chrono::nanoseconds> duration) {
  const Seconds end = interval.begin + interval.length;
  const double length = Seconds(interval.length).count();
  std::string where;
  if (interval.begin.count() < 0) {
    where = absl::StrFormat("warming up, %.0f s", -Seconds(interval.begin).count());
  } else if (duration) {
    where = Bar(std::min(1.0, end / Seconds(*duration)));
  } else {
    where = absl::StrFormat("%.0f s", end.count());
  }
  return absl::StrFormat("%s  %.4g/s  p50 %.3g ms  p99 %.3g ms  %d failed  %d in flight", where,
                         length > 0 ? static_cast<double>(interval.calls.ok) / length : 0,
                         Milliseconds(interval.calls.latency.ValueAt(0.5)),
                         Milliseconds(interval.calls.latency.ValueAt(0.99)), interval.calls.failed,
                         interval.in_flight);
}

LiveView::LiveView(bool is_enabled, std::optional<std::chrono::nanoseconds> duration)
    : is_shown_(is_enabled && isatty(STDERR_FILENO) == 1), duration_(duration) {}

LiveView::~LiveView() {
  if (is_shown_) std::fputs("\r\033[K", stderr);
}

void LiveView::Show(const TimedInterval& interval) {
  if (!is_shown_) return;
  std::fprintf(stderr, "\r\033[K%s", ProgressLine(interval, duration_).c_str());
  std::fflush(stderr);
}

}  // namespace rapt::load
