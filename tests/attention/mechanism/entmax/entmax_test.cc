#include "attention/mechanism/entmax/entmax.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace rapt {
namespace {

using ::testing::DoubleNear;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsNan;

constexpr double kInf = std::numeric_limits<double>::infinity();

std::vector<double> WeightsOf(double alpha, std::vector<double> scores) {
  EXPECT_TRUE(Entmax(alpha, absl::MakeSpan(scores)));
  return scores;
}

TEST(EntmaxTest, HandComputedExamples) {
  EXPECT_THAT(WeightsOf(2, {1, 0.5, 0}),
              ElementsAre(DoubleNear(0.75, 1e-15), DoubleNear(0.25, 1e-15), 0));
  EXPECT_THAT(WeightsOf(2, {3, 1, 1}), ElementsAre(1, 0, 0));
  // (1.5 - 1) s - tau is 4/5 and 3/5.
  EXPECT_THAT(WeightsOf(1.5, {2, 1.6, -1}),
              ElementsAre(DoubleNear(0.64, 1e-15), DoubleNear(0.36, 1e-15), 0));
  // x^4 and (x - 0.25)^4 sum to 1 for x = 0.93840.
  EXPECT_THAT(WeightsOf(1.25, {0, -1, -9}),
              ElementsAre(DoubleNear(0.77543, 1e-5), DoubleNear(0.22457, 1e-5), 0));
}

TEST(EntmaxTest, EqualScoresShareEqually) {
  for (double alpha : {1 + 0x1p-52, 1.001, 1.3, 1.5, 2.0}) {
    for (double score : {0.0, -7.5, 1e10, -1e300, -std::numeric_limits<double>::max()}) {
      EXPECT_THAT(WeightsOf(alpha, std::vector<double>(1000, score)), Each(DoubleNear(1e-3, 1e-15)))
          << alpha << " " << score;
    }
  }
}

TEST(EntmaxTest, AlphaNearOneIsSoftmax) {
  const std::vector<double> scores = {0.3, -2, 5, 4.5, -40};
  double sum = 0;
  for (double s : scores) sum += std::exp(s);
  const std::vector<double> weights = WeightsOf(1 + 0x1p-52, scores);
  for (size_t j = 0; j < scores.size(); ++j) {
    EXPECT_NEAR(weights[j], std::exp(scores[j]) / sum, 1e-14);
  }
}

TEST(EntmaxTest, RowsWithoutAScoreAreZerosAndNanOrInfinityGiveNan) {
  std::vector<double> hidden = {-kInf, -kInf};
  EXPECT_FALSE(Entmax(1.5, absl::MakeSpan(hidden)));
  EXPECT_THAT(hidden, ElementsAre(0, 0));
  std::vector<double> none;
  EXPECT_FALSE(Entmax(1.5, absl::MakeSpan(none)));
  EXPECT_THAT(WeightsOf(2, {1, kInf, -kInf}), Each(IsNan()));
  EXPECT_THAT(WeightsOf(2, {1, std::nan(""), 9}), Each(IsNan()));
  EXPECT_THAT(WeightsOf(2, {-kInf, 3, -kInf}), ElementsAre(0, 1, 0));
}

}  // namespace
}  // namespace rapt
