#include "attention/q8_0.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "attention/half.h"
#include "tests/support/tensor.h"

namespace rapt::q8_0 {
namespace {

std::vector<std::byte> Store(const std::vector<float>& numbers) {
  const auto size = static_cast<int64_t>(numbers.size());
  std::vector<std::byte> row(static_cast<size_t>(RowBytes(size)));
  StoreRow(reinterpret_cast<const std::byte*>(numbers.data()), DType::kFloat32, size, row.data());
  return row;
}

double ScaleOf(const std::vector<std::byte>& row, int64_t block) {
  return HalfToDouble(LoadAs<uint16_t>(row.data() + block * kBlockBytes, 0));
}

std::vector<float> Random(int64_t size, double largest, uint64_t seed) {
  test::Rng rng(seed);
  std::vector<float> numbers(static_cast<size_t>(size));
  for (float& x : numbers) x = static_cast<float>(test::Uniform(rng, -largest, largest));
  return numbers;
}

// Half the scale, and what the division of a number by it rounds.
double Allowed(double scale) { return scale * (0.5 + 127 * 0x1p-24); }

TEST(Q8_0Test, ARowHasTheLayoutOfGgml) {
  EXPECT_EQ(RowBytes(0), 0);
  EXPECT_EQ(RowBytes(1), 3);
  EXPECT_EQ(RowBytes(32), 34);
  EXPECT_EQ(RowBytes(33), 37);
  EXPECT_EQ(RowBytes(128), 136);
  // A scale of 1/2: 63.5 is 127 halves.
  const std::vector<std::byte> row = Store({63.5F, -63.5F, 0.5F, -0.2F});
  const std::vector<int> want = {0x00, 0x38, 127, 256 - 127, 1, 0};
  ASSERT_EQ(row.size(), want.size());
  for (size_t n = 0; n < want.size(); ++n) EXPECT_EQ(std::to_integer<int>(row[n]), want[n]) << n;
}

TEST(Q8_0Test, NumbersAreOffByHalfAScale) {
  for (const int64_t size : {1, 31, 32, 33, 64, 100, 128}) {
    for (const double largest : {1e-9, 1e-7, 1e-5, 1e-3, 1.0, 100.0, 8e6}) {
      const std::vector<float> numbers = Random(size, largest, static_cast<uint64_t>(size));
      const std::vector<std::byte> row = Store(numbers);
      for (int64_t n = 0; n < size; ++n) {
        const double scale = ScaleOf(row, n / kBlock);
        ASSERT_NEAR(LoadNumber(row.data(), n), numbers[n], Allowed(scale)) << largest << " " << n;
      }
    }
  }
}

TEST(Q8_0Test, TheScaleIsTheLeastThatCutsNothing) {
  for (uint64_t seed = 0; seed < 2000; ++seed) {
    const std::vector<float> numbers =
        Random(32, std::exp2(static_cast<double>(seed % 48) - 26), seed);
    double largest = 0;
    for (float x : numbers) largest = std::max(largest, std::abs(static_cast<double>(x)));
    const std::vector<std::byte> row = Store(numbers);
    const auto bits = LoadAs<uint16_t>(row.data(), 0);
    ASSERT_GE(127 * HalfToDouble(bits), largest);
    ASSERT_LT(127 * HalfToDouble(bits - 1), largest);
  }
}

TEST(Q8_0Test, BlocksOfOneRowDoNotAffectEachOther) {
  std::vector<float> numbers = Random(64, 1, 5);
  const std::vector<std::byte> before = Store(numbers);
  numbers[40] = 1000;
  const std::vector<std::byte> after = Store(numbers);
  EXPECT_TRUE(std::equal(before.begin(), before.begin() + kBlockBytes, after.begin()));
  EXPECT_FALSE(before == after);
}

TEST(Q8_0Test, WhatHasNoScaleIsNan) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), -std::numeric_limits<float>::quiet_NaN(),
        std::numeric_limits<float>::infinity(), 8.4e6F, -8.4e6F}) {
    std::vector<float> numbers(64, 1);
    numbers[3] = bad;
    const std::vector<std::byte> row = Store(numbers);
    for (int64_t n = 0; n < 64; ++n) {
      EXPECT_EQ(std::isnan(LoadNumber(row.data(), n)), n < kBlock) << bad << " " << n;
    }
    numbers[7] = bad;
    EXPECT_TRUE(Store(numbers) == row) << "NaN has one form";
  }
}

TEST(Q8_0Test, ReadsAllTypes) {
  const std::vector<float> numbers = Random(70, 3, 9);
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    std::vector<std::byte> halves(140), row(static_cast<size_t>(RowBytes(70)));
    std::vector<float> rounded(70);
    for (int64_t n = 0; n < 70; ++n) {
      StoreElement(halves.data(), dtype, n, numbers[n]);
      rounded[n] = static_cast<float>(LoadElement(halves.data(), dtype, n));
    }
    StoreRow(halves.data(), dtype, 70, row.data());
    EXPECT_TRUE(row == Store(rounded)) << NameOf(dtype);
  }
}

}  // namespace
}  // namespace rapt::q8_0
