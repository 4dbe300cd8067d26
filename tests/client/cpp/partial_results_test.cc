#include "client/cpp/partial_results.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <limits>
#include <utility>
#include <vector>

namespace rapt::client {
namespace {

using testing::DoubleNear;
using testing::ElementsAre;
using testing::Pointwise;

constexpr double kInfinity = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

struct Part {
  std::vector<double> y;
  std::vector<double> lse;
};

// Merges parts of one row of `size` numbers, or of several.
Part Merge(const std::vector<Part>& parts, size_t size) {
  PartialResults sum(parts[0].lse.size(), size);
  for (const Part& part : parts) {
    sum.Add(absl::MakeConstSpan(part.y), absl::MakeConstSpan(part.lse));
  }
  Part merged{std::vector<double>(parts[0].y.size()), std::vector<double>(parts[0].lse.size())};
  sum.Write(absl::MakeSpan(merged.y), absl::MakeSpan(merged.lse));
  return merged;
}

// The softmax of scores applied to values, of keys [begin, end).
Part Softmax(const std::vector<double>& scores, const std::vector<double>& values, size_t begin,
             size_t end) {
  double sum = 0, y = 0;
  for (size_t key = begin; key < end; ++key) {
    sum += std::exp(scores[key]);
    y += std::exp(scores[key]) * values[key];
  }
  return {{sum > 0 ? y / sum : 0}, {std::log(sum)}};
}

TEST(PartialResultsTest, PartsOfKeysMergeToAllKeys) {
  std::vector<double> scores, values;
  for (int n = 0; n < 20; ++n) {
    scores.push_back(3 * std::sin(n));
    values.push_back(std::cos(7 * n));
  }
  const Part whole = Softmax(scores, values, 0, 20);
  for (const std::vector<size_t>& ends :
       {std::vector<size_t>{20}, {1, 20}, {7, 13, 20}, {0, 10, 10, 20, 20}}) {
    std::vector<Part> parts;
    size_t begin = 0;
    for (const size_t end : ends)
      parts.push_back(Softmax(scores, values, std::exchange(begin, end), end));
    const Part merged = Merge(parts, 1);
    EXPECT_THAT(merged.y, Pointwise(DoubleNear(1e-14), whole.y));
    EXPECT_THAT(merged.lse, Pointwise(DoubleNear(1e-14), whole.lse));
  }
}

TEST(PartialResultsTest, NoKeysChangeNothing) {
  const Part none{{5, 5}, {-kInfinity}}, some{{1, 2}, {-3}};
  for (const std::vector<Part>& parts : {std::vector{none, some}, {some, none}, {some}}) {
    const Part merged = Merge(parts, 2);
    EXPECT_THAT(merged.y, ElementsAre(1, 2));
    EXPECT_THAT(merged.lse, ElementsAre(-3));
  }
  const Part nothing = Merge({none, none}, 2);
  EXPECT_THAT(nothing.y, ElementsAre(0, 0));
  EXPECT_THAT(nothing.lse, ElementsAre(-kInfinity));
}

TEST(PartialResultsTest, RowsAreIndependent) {
  const Part merged = Merge({{{1, 1, 2, 2}, {0, -kInfinity}}, {{3, 3, 4, 4}, {0, 7}}}, 2);
  EXPECT_THAT(merged.y, ElementsAre(2, 2, 4, 4));
  EXPECT_THAT(merged.lse, ElementsAre(DoubleNear(std::log(2), 1e-15), 7));
}

TEST(PartialResultsTest, NeitherLargeNorSmallSumsOverflow) {
  for (const double lse : {-1e5, 1e5}) {
    const Part merged = Merge({{{1}, {lse}}, {{3}, {lse}}, {{9}, {lse - 1e4}}}, 1);
    EXPECT_THAT(merged.y, ElementsAre(2));
    EXPECT_THAT(merged.lse, ElementsAre(DoubleNear(lse + std::log(2), 1e-9)));
  }
}

TEST(PartialResultsTest, WhatIsNotANumberStaysSo) {
  const Part some{{1}, {0}};
  for (const double lse : {kNaN, kInfinity}) {
    for (const std::vector<Part>& parts :
         {std::vector<Part>{{{1}, {lse}}}, {{{1}, {lse}}, some}, {some, {{1}, {lse}}, some}}) {
      const Part merged = Merge(parts, 1);
      EXPECT_TRUE(std::isnan(merged.y[0])) << lse;
      EXPECT_TRUE(std::isnan(merged.lse[0])) << lse;
    }
  }
}

}  // namespace
}  // namespace rapt::client
