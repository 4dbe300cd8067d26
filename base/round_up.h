// Rounding of sizes and offsets.
#ifndef RAPT_BASE_ROUND_UP_H_
#define RAPT_BASE_ROUND_UP_H_

#include <cstdint>

namespace rapt {

// Returns the smallest multiple of `step` >= `n`. REQUIRES: n >= 0, step > 0, their sum fits.
constexpr int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace rapt

#endif  // RAPT_BASE_ROUND_UP_H_
