// Tests the kernels' approximation of e^x in isolation, over the whole range of scores. A mask sets
// the scores of two keys to 0 and x, so that their weights are 1 / (1 + e^x) and e^x / (1 +
// e^x).
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

// The allowed relative error of weights. e^x is computed from x / ln 2, whose rounding error grows
// with |x|.
struct Accuracy {
  double relative;
  double per_x;
  double underflow;  // smaller values may be 0
};
constexpr Accuracy kFp32 = {5e-7, 1e-7, 1.25e-38};
constexpr Accuracy kFp64 = {1e-15, 1e-16, 1e-307};

// Returns the weight of the key with score x for each x. The other key has weight 1 - w.
std::vector<double> WeightsOf(DType dtype, const std::vector<double>& xs, const Target& target) {
  const int64_t rows = static_cast<int64_t>(xs.size());
  const Problem problem{.dtype = dtype,
                        .batch = 1,
                        .query_heads = 1,
                        .kv_heads = 1,
                        .query_length = rows,
                        .key_length = 2,
                        .head_size = 1,
                        .value_head_size = 1,
                        .mask = MaskShape{dtype, {1, 1, rows, 2}},
                        .score_output = ScoreOutput::kWeights};
  Inputs inputs;
  inputs.query = Tensor(dtype, {1, 1, rows, 1}).Fill(0);
  inputs.key = Tensor(dtype, {1, 1, 2, 1}).Fill(0);
  inputs.value = Tensor(dtype, {1, 1, 2, 1}).Fill(1);
  inputs.mask = Tensor(dtype, {1, 1, rows, 2}).Fill(0);
  for (int64_t i = 0; i < rows; ++i) inputs.mask->Set(0, 0, i, 1, xs[i]);
  const auto outputs = RunAttention(problem, inputs, target.Options());
  EXPECT_TRUE(outputs.ok()) << outputs.status();
  std::vector<double> weights;
  for (int64_t i = 0; i < rows; ++i) {
    const double other = outputs->scores->At(0, 0, i, 0);
    weights.push_back(outputs->scores->At(0, 0, i, 1));
    EXPECT_TRUE(std::isnan(xs[i]) || std::fabs(other + weights.back() - 1) <= 1e-6)
        << "x = " << xs[i] << ": weights " << other << " and " << weights.back();
  }
  return weights;
}

void ExpectAccurate(DType dtype, const std::vector<double>& xs, const Accuracy& accuracy) {
  for (const Target& target : Targets()) {
    const std::vector<double> got = WeightsOf(dtype, xs, target);
    int reported = 0;
    for (size_t n = 0; n < xs.size() && reported < 5; ++n) {
      const double want = std::exp(xs[n]) / (1 + std::exp(xs[n]));
      const double allowed =
          want * (accuracy.relative + accuracy.per_x * std::fabs(xs[n])) + accuracy.underflow;
      if (std::fabs(got[n] - want) <= allowed) continue;
      ++reported;
      ADD_FAILURE() << target.Name() << " " << NameOf(dtype) << ": x = " << xs[n] << " weighs "
                    << got[n] << ", should be " << want;
    }
  }
}

// Negative numbers from the smallest denormal to the largest finite one, then a dense range in
// which results do not underflow, including denormal results.
std::vector<double> EveryMagnitude(double least) {
  std::vector<double> xs = {-0.0};
  for (uint32_t bits = 0x80000001; bits < 0xFF800000; bits += 65521) {
    xs.push_back(std::bit_cast<float>(bits));
  }
  for (int n = 0; n < 40000; ++n) xs.push_back(static_cast<float>(least * n / 40000));
  return xs;
}

TEST(ExponentialTest, IsAccurateForEveryFp32) {
  ExpectAccurate(DType::kFloat32, EveryMagnitude(-110), kFp32);
}

TEST(ExponentialTest, IsAccurateForEveryMagnitudeOfFp64) {
  ExpectAccurate(DType::kFloat64, EveryMagnitude(-760), kFp64);
}

TEST(ExponentialTest, OfMinusInfinityIsZeroAndOfNaNIsNaN) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (const DType dtype : {DType::kFloat32, DType::kFloat64}) {
    for (const Target& target : Targets()) {
      const std::vector<double> got = WeightsOf(dtype, {-infinity, std::nan(""), 0}, target);
      EXPECT_EQ(got[0], 0) << target.Name();
      EXPECT_TRUE(std::isnan(got[1])) << target.Name();
      EXPECT_EQ(got[2], 0.5) << target.Name();
    }
  }
}

}  // namespace
}  // namespace rapt::test
