#include "client/load/arrivals.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/invalid.h"

namespace rapt::load {
namespace {

using std::chrono::nanoseconds;
using Seconds = std::chrono::duration<double>;

constexpr double kMaxRate = 1e7;
constexpr int64_t kMaxSteps = 1000;

nanoseconds ToNanoseconds(double seconds) {
  return std::chrono::duration_cast<nanoseconds>(Seconds(seconds));
}

// Returns the expected number of arrivals in the segment.
double Expected(const RateSegment& segment) {
  return Seconds(segment.duration).count() * (segment.from + segment.to) / 2;
}

// Returns the time at which the expected number of arrivals reaches `arrivals`. REQUIRES:
// `arrivals` <= Expected().
double SecondsUntil(const RateSegment& segment, double arrivals) {
  if (arrivals <= 0) return 0;
  const double slope = (segment.to - segment.from) / Seconds(segment.duration).count();
  const double square = segment.from * segment.from + 2 * slope * arrivals;
  // Solves from*t + slope*t^2/2 = arrivals in the form without cancellation.
  return 2 * arrivals / (segment.from + std::sqrt(std::max(square, 0.0)));
}

// Returns the time at which `arrivals` are expected since the start.
double TimeOf(const std::vector<RateSegment>& segments, double arrivals) {
  double begin = 0;
  for (const RateSegment& segment : segments) {
    const double expected = Expected(segment);
    if (arrivals <= expected) return begin + SecondsUntil(segment, arrivals);
    arrivals -= expected;
    begin += Seconds(segment.duration).count();
  }
  return begin + arrivals / segments.back().to;
}

absl::Status RateError(absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "--rate is '%s'; it takes requests/s, 0.001 to %g, as '100', a ramp '10..500' or a ramp in "
      "steps '10..500/5'",
      text, kMaxRate));
}

absl::Status LineError(int64_t line, absl::string_view text) {
  return absl::InvalidArgumentError(absl::StrFormat(
      "line %d of the trace is '%s'; it must be seconds from the start, at least 0, and optionally "
      "a shape",
      line, text));
}

}  // namespace

absl::StatusOr<std::vector<RateSegment>> ParseRate(std::string_view rate, nanoseconds duration) {
  const absl::string_view text(rate.data(), rate.size());
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits('/', 1));
  const std::vector<absl::string_view> ends = absl::StrSplit(parts.first, "..");
  double from = 0, to = 0;
  if (ends.size() > 2 || !absl::SimpleAtod(ends.front(), &from) ||
      !absl::SimpleAtod(ends.back(), &to)) {
    return RateError(text);
  }
  for (const double end : {from, to}) {
    if (!(end >= 0.001 && end <= kMaxRate)) return RateError(text);
  }
  if (parts.second.empty()) return std::vector<RateSegment>{{duration, from, to}};
  int64_t steps = 0;
  if (!absl::SimpleAtoi(parts.second, &steps) || steps < 2 || steps > kMaxSteps) {
    return RateError(text);
  }
  std::vector<RateSegment> segments;
  for (int64_t i = 0; i < steps; ++i) {
    const double step =
        from + (to - from) * static_cast<double>(i) / static_cast<double>(steps - 1);
    segments.push_back({duration / steps, step, step});
  }
  return segments;
}

Arrivals Arrivals::Evenly(std::vector<RateSegment> segments) {
  Arrivals arrivals;
  arrivals.segments_ = std::move(segments);
  return arrivals;
}

Arrivals Arrivals::AtRandom(std::vector<RateSegment> segments, uint64_t seed) {
  Arrivals arrivals = Evenly(std::move(segments));
  arrivals.random_.emplace(seed);
  return arrivals;
}

Arrivals Arrivals::Replay(std::vector<nanoseconds> times) {
  Arrivals arrivals;
  arrivals.replays_ = true;
  arrivals.times_ = std::move(times);
  return arrivals;
}

std::optional<nanoseconds> Arrivals::Next() {
  if (replays_) {
    if (next_ == times_.size()) return std::nullopt;
    return times_[next_++];
  }
  // A process of varying rate is one of rate 1 in units of expected arrivals.
  if (random_) expected_ += std::exponential_distribution<double>()(*random_);
  const double time = TimeOf(segments_, expected_);
  if (!random_) expected_ += 1;
  return ToNanoseconds(time);
}

absl::StatusOr<Trace> ParseTrace(std::string_view text) {
  struct Line {
    nanoseconds time;
    std::optional<size_t> shape;
  };
  Trace trace;
  std::vector<Line> lines;
  int64_t number = 0;
  for (const absl::string_view whole :
       absl::StrSplit(absl::string_view(text.data(), text.size()), '\n')) {
    ++number;
    const std::pair<absl::string_view, absl::string_view> uncommented =
        absl::StrSplit(whole, absl::MaxSplits('#', 1));
    const absl::string_view line = absl::StripAsciiWhitespace(uncommented.first);
    if (line.empty()) continue;
    const std::pair<absl::string_view, absl::string_view> parts =
        absl::StrSplit(line, absl::MaxSplits(absl::ByAnyChar(" \t,"), 1));
    double seconds = 0;
    if (!absl::SimpleAtod(parts.first, &seconds) || !(seconds >= 0 && seconds <= 1e6)) {
      return LineError(number, line);
    }
    lines.push_back({ToNanoseconds(seconds), std::nullopt});
    const absl::string_view shape = absl::StripAsciiWhitespace(parts.second);
    if (shape.empty()) continue;
    const auto known = std::find(trace.shapes.begin(), trace.shapes.end(), shape);
    lines.back().shape = static_cast<size_t>(known - trace.shapes.begin());
    if (known == trace.shapes.end()) trace.shapes.emplace_back(shape);
  }
  if (lines.empty()) return Invalid("the trace is empty; it must have at least one request");
  std::stable_sort(lines.begin(), lines.end(),
                   [](const Line& a, const Line& b) { return a.time < b.time; });
  for (const Line& line : lines) {
    if (line.shape.has_value() == trace.shapes.empty()) {
      return Invalid(
          "some lines of the trace have a shape and some have none; all or none must have one");
    }
    trace.times.push_back(line.time);
    if (line.shape) trace.shape_of.push_back(*line.shape);
  }
  return trace;
}

}  // namespace rapt::load
