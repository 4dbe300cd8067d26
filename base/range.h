// Bounds of numbers from external input.
#ifndef RAPT_BASE_RANGE_H_
#define RAPT_BASE_RANGE_H_

#include <cstdint>
#include <limits>

#include "absl/numeric/int128.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace rapt {

// From `least` to `most`, both included.
struct IntegerRange {
  int64_t least = std::numeric_limits<int64_t>::min();
  int64_t most = std::numeric_limits<int64_t>::max();

  bool operator==(const IntegerRange&) const = default;
};

// Counts and positions below 2^62: the sum of two of them, or of one and a page, has 64 bits.
inline constexpr IntegerRange kCounts = {0, (int64_t{1} << 62) - 1};

// Returns InvalidArgument, "NAME is -1; it must be in [0, 2^62)", if the value is outside.
absl::Status CheckRange(absl::string_view name, absl::int128 value, IntegerRange range);

}  // namespace rapt

#endif  // RAPT_BASE_RANGE_H_
