// attention_bias on every backend and instruction set, in every type.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

using ::testing::Each;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr uint64_t kSeed = 20241123;
constexpr int64_t kQueries = 17;
constexpr int64_t kKeys = 70;

class BiasTest : public ::testing::TestWithParam<DType> {
 protected:
  static Problem Make() {
    return {.dtype = GetParam(),
            .batch = 2,
            .query_heads = 4,
            .kv_heads = 2,
            .query_length = kQueries,
            .key_length = kKeys,
            .head_size = 24,
            .value_head_size = 17,
            .wants_lse = true};
  }
};

TEST_P(BiasTest, ALastAxisOfZeroHidesEveryKey) {
  for (const bool is_bias : {false, true}) {
    Rng rng(kSeed);
    Problem problem = Make();
    (is_bias ? problem.bias : problem.mask) = MaskShape{GetParam(), {1, 1, kQueries, 0}};
    const Inputs inputs = RandomInputs(problem, rng);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const Outputs got =
          RunAttention(problem, inputs, {.backend = target.backend, .isa = target.isa}).value();
      EXPECT_THAT(got.output.ToVector(), Each(0));
      EXPECT_THAT(got.lse->ToVector(), Each(-kInf));
    }
  }
}

TEST_P(BiasTest, EqualsAFloatMask) {
  for (const int64_t last : {kKeys, kKeys - 9, int64_t{1}}) {
    Rng rng(kSeed);
    Problem masked = Make();
    masked.causal = true;
    masked.mask = MaskShape{GetParam(), {2, 1, kQueries, last}};
    const Inputs with_mask = RandomInputs(masked, rng);
    Problem biased = masked;
    biased.bias = std::exchange(biased.mask, std::nullopt);
    Inputs with_bias = with_mask;
    with_bias.bias = std::exchange(with_bias.mask, std::nullopt);
    ExpectSameOutputs(masked, with_mask, biased, with_bias);
  }
}

TEST_P(BiasTest, WithABoolMaskEqualsOneFloatMask) {
  Rng rng(kSeed);
  Problem both = Make();
  both.mask = MaskShape{DType::kBool, {1, 4, 1, kKeys}};
  both.bias = MaskShape{GetParam(), {1, 4, kQueries, kKeys}};
  const Inputs with_both = RandomInputs(both, rng);
  Problem combined = Make();
  combined.mask = both.bias;
  Inputs with_combined = with_both;
  with_combined.bias.reset();
  with_combined.mask = *with_both.bias;
  for (int64_t h = 0; h < 4; ++h) {
    for (int64_t i = 0; i < kQueries; ++i) {
      for (int64_t j = 0; j < kKeys; ++j) {
        if (with_both.mask->At(0, h, 0, j) == 0) with_combined.mask->Set(0, h, i, j, -kInf);
      }
    }
  }
  ExpectSameOutputs(both, with_both, combined, with_combined);
}

TEST_P(BiasTest, HiddenKeysNeverMatter) {
  for (const DType mask : {DType::kBool, DType::kFloat32}) {
    Rng rng(kSeed);
    Problem problem = Make();
    problem.mask = MaskShape{mask, {1, 1, kQueries, kKeys}};
    problem.bias = MaskShape{GetParam(), {1, 1, 1, kKeys - 3}};
    Inputs inputs = RandomInputs(problem, rng);
    inputs.bias->Set(0, 0, 0, 5, -kInf);
    Inputs poisoned = inputs;
    // +inf hides nothing, and added to the -inf of the bias it would be NaN.
    if (mask == DType::kFloat32) {
      for (int64_t i = 0; i < kQueries; ++i) poisoned.mask->Set(0, 0, i, 5, kInf);
    }
    for (const int64_t j : {int64_t{5}, kKeys - 1}) {
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t h = 0; h < 2; ++h) {
          for (int64_t e = 0; e < 17; ++e) {
            poisoned.value.Set(b, h, j, e, std::numeric_limits<double>::quiet_NaN());
          }
        }
      }
    }
    ExpectSameOutputs(problem, inputs, problem, poisoned);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, BiasTest,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                           DType::kFloat64),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

}  // namespace
}  // namespace rapt::test
