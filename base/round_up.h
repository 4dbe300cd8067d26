// Rounding of sizes, offsets and counts.
#ifndef RAPT_BASE_ROUND_UP_H_
#define RAPT_BASE_ROUND_UP_H_

#include <cstdint>

namespace rapt {

// Returns the smallest multiple of `step` >= `n`. REQUIRES: n >= 0, step > 0, their sum fits.
constexpr int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Returns n / divisor, rounded up. REQUIRES: n >= 0, divisor > 0.
constexpr int64_t CeilDiv(int64_t n, int64_t divisor) {
  return n / divisor + (n % divisor != 0 ? 1 : 0);
}

}  // namespace rapt

#endif  // RAPT_BASE_ROUND_UP_H_
