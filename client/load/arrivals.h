// When requests are due: an open loop sends at these times whatever becomes of the requests before.
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

// A stretch of time in which the rate changes evenly from one to another; requests/s, at least one
// of them above 0.
struct RateSegment {
  std::chrono::nanoseconds duration{0};
  double from = 0;
  double to = 0;
};

// "100", "10..500" for a ramp, "10..500/5" for five equal steps, over `duration`. InvalidArgument,
// naming --rate.
absl::StatusOr<std::vector<RateSegment>> ParseRate(std::string_view text,
                                                   std::chrono::nanoseconds duration);

// One after another. Thread-compatible.
class Arrivals {
 public:
  // The last segment's final rate goes on for ever.
  static Arrivals Evenly(std::vector<RateSegment> segments);
  // As many on average, but each independent of the others: Poisson's process.
  static Arrivals AtRandom(std::vector<RateSegment> segments, uint64_t seed);
  // At these times, which never fall, and no more.
  static Arrivals Replay(std::vector<std::chrono::nanoseconds> times);

  // From the start of the load; nothing when there are no more.
  std::optional<std::chrono::nanoseconds> Next();

 private:
  Arrivals() = default;

  std::vector<RateSegment> segments_;
  std::optional<std::mt19937_64> random_;  // absent: evenly
  double expected_ = 0;                    // how many arrivals the segments expect until the next

  bool replays_ = false;
  std::vector<std::chrono::nanoseconds> times_;
  size_t next_ = 0;
};

// A recorded load: a line a request, seconds from the start, then its shape as a mix states it, or
// nothing: "0.125 1x8x1024x64 causal". '#' begins a comment. The lines may be in any order.
struct Trace {
  std::vector<std::chrono::nanoseconds> times;  // rising
  std::vector<std::string> shapes;              // each once
  std::vector<size_t> shape_of;                 // for each time; empty when no line has a shape
};
// InvalidArgument names the line.
absl::StatusOr<Trace> ParseTrace(std::string_view text);

}  // namespace rapt::load

#endif  // RAPT_CLIENT_LOAD_ARRIVALS_H_
