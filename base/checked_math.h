// Arithmetic on sizes that came from outside: nothing on overflow, instead of a wrong number.
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

// The product of sizes, each at least 0. A zero anywhere gives 0, whatever the others are.
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
