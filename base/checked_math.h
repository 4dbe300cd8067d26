// Arithmetic on sizes from external input. Returns nullopt on overflow.
#ifndef RAPT_BASE_CHECKED_MATH_H_
#define RAPT_BASE_CHECKED_MATH_H_

#include <cstdint>
#include <optional>
#include <span>

namespace rapt {

inline std::optional<int64_t> CheckedMul(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

inline std::optional<int64_t> CheckedAdd(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_add_overflow(a, b, &result)) return std::nullopt;
  return result;
}

// Returns the product; 0 if any factor is 0. REQUIRES: every factor >= 0.
inline std::optional<int64_t> CheckedProduct(std::span<const int64_t> factors) {
  for (int64_t factor : factors) {
    if (factor == 0) return 0;
  }
  int64_t product = 1;
  for (int64_t factor : factors) {
    const std::optional<int64_t> next = CheckedMul(product, factor);
    if (!next) return std::nullopt;
    product = *next;
  }
  return product;
}

}  // namespace rapt

#endif  // RAPT_BASE_CHECKED_MATH_H_
