#include "base/checked_math.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace rapt {
namespace {

constexpr int64_t kMax = std::numeric_limits<int64_t>::max();

std::optional<int64_t> ProductOf(const std::vector<int64_t>& factors) {
  return CheckedProduct(factors);
}

TEST(CheckedMathTest, ComputesSumsAndProductsInRange) {
  EXPECT_EQ(CheckedMul(6, -7), -42);
  EXPECT_EQ(CheckedAdd(kMax - 1, 1), kMax);
  EXPECT_EQ(ProductOf({2, 3, 7}), 42);
  EXPECT_EQ(ProductOf({}), 1);
}

TEST(CheckedMathTest, ReturnsNulloptOnOverflow) {
  EXPECT_EQ(CheckedMul(kMax, 2), std::nullopt);
  EXPECT_EQ(CheckedAdd(kMax, 1), std::nullopt);
  EXPECT_EQ(ProductOf({int64_t{1} << 32, int64_t{1} << 31}), std::nullopt);
}

TEST(CheckedMathTest, AnyZeroFactorGivesZero) {
  EXPECT_EQ(ProductOf({kMax, kMax, 0}), 0);
  EXPECT_EQ(ProductOf({0, kMax, kMax}), 0);
}

}  // namespace
}  // namespace rapt
