// Sizes and offsets in whole steps.
#ifndef RAPT_BASE_ROUND_UP_H_
#define RAPT_BASE_ROUND_UP_H_

#include <cstdint>

namespace rapt {

// The least multiple of `step` that is not less than `n`, which is at least 0; their sum must fit.
constexpr int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

}  // namespace rapt

#endif  // RAPT_BASE_ROUND_UP_H_
