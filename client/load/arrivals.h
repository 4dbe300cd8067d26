// Arrival times. An open loop sends at these times, independently of earlier requests.
#ifndef RAPT_CLIENT_LOAD_ARRIVALS_H_
#define RAPT_CLIENT_LOAD_ARRIVALS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace rapt::load {

// A time interval in which the rate changes linearly. Rates are requests/s; at least one is above
// 0.
struct RateSegment {
  std::chrono::nanoseconds duration{0};
  double from = 0;
  double to = 0;
};

// Parses "100", "10..500" for a ramp, or "10..500/5" for five equal steps, over `duration`.
// InvalidArgument names --rate.
absl::StatusOr<std::vector<RateSegment>> ParseRate(std::string_view rate,
                                                   std::chrono::nanoseconds duration);

// A sequence of arrival times. Thread-compatible.
class Arrivals {
 public:
  // Evenly spaced. The final rate of the last segment continues forever.
  static Arrivals Evenly(std::vector<RateSegment> segments);
  // A Poisson process of the same rate.
  static Arrivals AtRandom(std::vector<RateSegment> segments, uint64_t seed);
  // At these times only. REQUIRES: `times` is sorted.
  static Arrivals Replay(std::vector<std::chrono::nanoseconds> times);

  // Returns the next time since the start of the load, or nullopt at the end.
  std::optional<std::chrono::nanoseconds> Next();

 private:
  Arrivals() = default;

  std::vector<RateSegment> segments_;
  std::optional<std::mt19937_64> random_;  // absent: evenly spaced
  double expected_ = 0;                    // expected number of arrivals until the next one

  bool replays_ = false;
  std::vector<std::chrono::nanoseconds> times_;
  size_t next_ = 0;
};

// A recorded load. Each line has the seconds since the start and, optionally, a shape as in a mix:
// "0.125 1x8x1024x64 causal". '#' begins a comment. Lines may be in any order.
struct Trace {
  std::vector<std::chrono::nanoseconds> times;  // sorted
  std::vector<std::string> shapes;              // distinct
  std::vector<size_t> shape_of;                 // for each time; empty if no line has a shape
};
// InvalidArgument names the line.
absl::StatusOr<Trace> ParseTrace(std::string_view text);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_ARRIVALS_H_
