#include "client/load/histogram.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <vector>

namespace rapt::load {
namespace {

TEST(HistogramTest, IsZeroWhenEmpty) {
  const Histogram histogram;
  EXPECT_EQ(histogram.count(), 0);
  EXPECT_EQ(histogram.ValueAt(0.99), 0);
  EXPECT_EQ(histogram.mean(), 0);
  EXPECT_TRUE(histogram.Buckets().empty());
}

TEST(HistogramTest, ReturnsExactExtremes) {
  Histogram histogram;
  for (const int64_t value : {1'234'567'890, 5, 77'777}) histogram.Record(value);
  EXPECT_EQ(histogram.min(), 5);
  EXPECT_EQ(histogram.ValueAt(0), 5);
  EXPECT_EQ(histogram.max(), 1'234'567'890);
  EXPECT_EQ(histogram.ValueAt(1), 1'234'567'890);
}

// Every quantile of values from nanoseconds to hours, against the sorted values.
TEST(HistogramTest, KeepsThreeDigitsOfEveryQuantile) {
  std::mt19937_64 random(11);
  std::uniform_real_distribution<double> exponent(0, 43);
  Histogram histogram;
  std::vector<int64_t> values;
  for (int i = 0; i < 20'000; ++i) {
    values.push_back(static_cast<int64_t>(std::exp2(exponent(random))));
    histogram.Record(values.back());
  }
  std::sort(values.begin(), values.end());
  for (const double quantile : {0.0001, 0.01, 0.25, 0.5, 0.9, 0.99, 0.999, 0.9999}) {
    const auto rank = static_cast<size_t>(std::ceil(quantile * 20'000 - 1e-6));
    const auto want = static_cast<double>(values[rank - 1]);
    const auto got = static_cast<double>(histogram.ValueAt(quantile));
    EXPECT_GE(got, want) << quantile;
    EXPECT_LE(got, want * (1 + 1.0 / 1024)) << quantile;
  }
}

TEST(HistogramTest, TheSumEqualsTheHistogramOfAllValues) {
  Histogram one, other, all;
  for (int64_t i = 1; i <= 1000; ++i) {
    (i % 3 == 0 ? one : other).Record(i * i * i);
    all.Record(i * i * i);
  }
  one.Add(other);
  EXPECT_EQ(one.count(), all.count());
  EXPECT_EQ(one.min(), all.min());
  EXPECT_EQ(one.max(), all.max());
  EXPECT_DOUBLE_EQ(one.mean(), all.mean());
  for (const double quantile : {0.1, 0.5, 0.99}) {
    EXPECT_EQ(one.ValueAt(quantile), all.ValueAt(quantile));
  }
}

TEST(HistogramTest, IsRestoredFromItsBuckets) {
  Histogram histogram, again;
  for (int64_t i = 0; i < 5000; ++i) histogram.Record(i * 997);
  for (const auto& [value, count] : histogram.Buckets()) again.Record(value, count);
  EXPECT_EQ(again.count(), 5000);
  for (const double quantile : {0.001, 0.5, 0.999, 1.0}) {
    EXPECT_EQ(again.ValueAt(quantile), histogram.ValueAt(quantile));
  }
}

TEST(HistogramTest, ClampsValuesOutOfRange) {
  Histogram histogram;
  histogram.Record(-5);
  histogram.Record(Histogram::kMaxValue * 2);
  EXPECT_EQ(histogram.min(), 0);
  EXPECT_EQ(histogram.max(), Histogram::kMaxValue);
}

}  // namespace
}  // namespace rapt::load
