// Additive scores on every backend and instruction set, in every type.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/problem_text.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

constexpr uint64_t kSeed = 20241127;
constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNaN = std::numeric_limits<double>::quiet_NaN();

class AdditiveTest : public ::testing::TestWithParam<DType> {
 protected:
  static Problem Make() {
    return {.dtype = GetParam(),
            .batch = 2,
            .query_heads = 6,
            .kv_heads = 2,
            .query_length = 17,
            .key_length = 70,
            .head_size = 21,
            .value_head_size = 19,
            .score_function = ScoreFunction::kAdditive,
            .additive_weight = AdditiveWeight{GetParam(), 6},
            .wants_lse = true};
  }
};

TEST_P(AdditiveTest, MatchesTheDefinition) {
  std::vector<Problem> problems(14, Make());
  problems[1].causal = true;
  problems[1].additive_weight->heads = 1;
  problems[1].head_sink = DType::kFloat32;
  problems[2].past_length = 9;
  problems[2].softcap = 3;
  problems[2].wants_present = true;
  problems[3].has_key_lengths = true;
  problems[3].left_window = 12;
  problems[3].additive_weight->dtype = DType::kFloat32;
  problems[4].mask = MaskShape{DType::kBool, {1, 1, 17, 70}};
  problems[4].score_output = ScoreOutput::kWeights;
  problems[4].head_size = 64;
  problems[5].bias = MaskShape{GetParam(), {2, 1, 17, 68}};
  problems[5].score_output = ScoreOutput::kBiased;
  problems[5].scale = -2.5;
  problems[6].query_length = 1;
  problems[6].past_length = 69;
  problems[6].relative_bias = RelativeBias{DType::kFloat32, 6, 9};
  problems[7].query_heads = problems[7].kv_heads = 1;
  problems[7].additive_weight->heads = 1;
  problems[7].query_length = 120;
  problems[7].key_length = 3;
  problems[7].head_size = 1;
  problems[7].score_output = ScoreOutput::kScores;
  problems[8].values_in_keys = true;
  problems[8].dropout = Dropout{.probability = 0.3, .seed = 5};
  problems[8].alibi = true;
  problems[9].query_length = 3;  // tasks with several heads
  problems[9].scale = 0.5;
  problems[9].score_output = ScoreOutput::kSoftcapped;
  problems[9].softcap = 2;
  problems[10].query_length = 130;
  problems[10].key_length = 129;
  problems[10].softmax_in_fp64 = true;
  problems[11].rope_theta = 10000;
  problems[11].head_size = 22;
  problems[11].past_length = 5;
  problems[11].wants_present = true;
  problems[12].rotary_cache = RotaryCache{.rows = 90, .pairs = 5};
  problems[12].rotary_embedding_dim = 10;
  problems[12].rotary_keys = false;
  problems[12].query_length = 1;
  problems[13].relative_values = RelativeVectors{DType::kFloat32, 6, 9};
  problems[13].causal = true;
  Rng rng(kSeed);
  for (const Problem& problem : problems) ExpectConforms(problem, RandomInputs(problem, rng));
}

TEST_P(AdditiveTest, MatchesTheDefinitionWithSplitKeys) {
  Problem problem = Make();
  problem.query_heads = 4;
  problem.additive_weight->heads = 4;
  problem.query_length = 1;
  problem.key_length = 2200;
  problem.head_sink = DType::kFloat32;
  Rng rng(kSeed);
  ExpectConforms(problem, RandomInputs(problem, rng), /*threads=*/16);
}

TEST_P(AdditiveTest, MatchesTheDefinitionInAnyStorage) {
  Problem problem = Make();
  problem.past_length = 5;
  for (const Storage storage : {Storage::kBshd, Storage::kPaddedRows, Storage::kMisaligned}) {
    Rng rng(kSeed);
    ExpectConforms(problem, RandomInputs(problem, rng, {storage, storage, storage}));
  }
}

// Exponentials of elements above 21 (175 in FP64) would overflow; opposite ones cancel exactly.
TEST_P(AdditiveTest, LargeElementsAreExact) {
  Problem problem = Make();
  problem.score_output = ScoreOutput::kScores;
  for (const double magnitude : {20.9, 30.0, 64.0, 174.0, 400.0, 6e4}) {
    Rng rng(kSeed);
    Inputs inputs = RandomInputs(problem, rng, {}, magnitude);
    for (int64_t j = 0; j < problem.query_length; ++j) {
      for (int64_t d = 0; d < problem.head_size; ++d) {
        inputs.key.Set(0, 0, j, d, -inputs.query.At(0, 0, j, d));
      }
    }
    ExpectConforms(problem, inputs);
  }
}

TEST_P(AdditiveTest, OneLargeElementChangesNoOtherScore) {
  Problem problem = Make();
  problem.score_output = ScoreOutput::kScores;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.key.Set(1, 1, 66, 2, 300);
  ExpectConforms(problem, inputs);
  inputs.query.Set(0, 3, 5, 20, -300);
  ExpectConforms(problem, inputs);
}

TEST_P(AdditiveTest, InfinityAndNanFollowTanh) {
  Problem problem = Make();
  problem.score_output = ScoreOutput::kScores;
  problem.wants_lse = false;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.query.Set(0, 0, 0, 0, kInf);
  inputs.key.Set(0, 0, 3, 1, -kInf);
  inputs.key.Set(0, 0, 4, 0, -kInf);  // inf - inf with query 0
  inputs.key.Set(1, 1, 69, 7, kNaN);
  ExpectConforms(problem, inputs);
}

TEST_P(AdditiveTest, HugeWeightsAreExact) {
  Problem problem = Make();
  problem.dtype = DType::kFloat32;
  problem.additive_weight->dtype = DType::kFloat32;
  problem.query_length = problem.key_length = 2;
  problem.score_output = ScoreOutput::kScores;
  problem.wants_lse = false;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.additive_weight->Fill(0);
  for (int64_t h = 0; h < 6; ++h) inputs.additive_weight->Set(h, 3, 0, 0, 3e38);
  inputs.additive_weight->Set(5, 0, 0, 0, kInf);
  const Expected expected = Attend(problem, inputs);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = RunAttention(problem, inputs, target.Options()).value();
    const std::vector<double> scores = got.scores->ToVector();
    for (size_t n = 0; n < scores.size(); ++n) {
      if (std::isinf(expected.scores[n])) {
        EXPECT_EQ(scores[n], expected.scores[n]) << n;
      } else {
        EXPECT_NEAR(scores[n] / expected.scores[n], 1, 1e-5) << n;
      }
    }
  }
}

TEST_P(AdditiveTest, HiddenKeysNeverMatter) {
  Problem problem = Make();
  problem.has_key_lengths = true;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.key_lengths = {40, 0};
  Inputs poisoned = inputs;
  for (int64_t h = 0; h < problem.kv_heads; ++h) {
    for (int64_t j = 40; j < problem.key_length; ++j) {
      poisoned.key.Set(0, h, j, 3, kNaN);
      poisoned.value.Set(0, h, j, 3, kInf);
    }
  }
  const Expected expected = Attend(problem, inputs);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = RunAttention(problem, poisoned, target.Options()).value();
    EXPECT_TRUE(Matches(problem, got, expected));
  }
}

TEST_P(AdditiveTest, QueriesAndKeysAreInterchangeable) {
  Problem problem = Make();
  problem.kv_heads = problem.query_heads;
  problem.score_output = ScoreOutput::kScores;
  Problem swapped = problem;
  std::swap(swapped.query_length, swapped.key_length);
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(problem, rng);
  Inputs other = RandomInputs(swapped, rng);
  other.query = inputs.key;
  other.key = inputs.query;
  other.additive_weight = inputs.additive_weight;
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs a = RunAttention(problem, inputs, target.Options()).value();
    const Outputs b = RunAttention(swapped, other, target.Options()).value();
    for (int64_t i = 0; i < problem.query_length; ++i) {
      for (int64_t j = 0; j < problem.key_length; ++j) {
        ASSERT_EQ(a.scores->At(1, 4, i, j), b.scores->At(1, 4, j, i)) << i << ", " << j;
      }
    }
  }
}

TEST_P(AdditiveTest, WeightsOfZeroGiveTheMeanOfV) {
  Problem problem = Make();
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.additive_weight->Fill(0);
  inputs.value.Fill(0.25);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = RunAttention(problem, inputs, target.Options()).value();
    for (const double y : got.output.ToVector()) EXPECT_NEAR(y, 0.25, ToleranceOf(GetParam()));
    for (const double lse : got.lse->ToVector()) EXPECT_NEAR(lse, std::log(70), 1e-5);
  }
}

INSTANTIATE_TEST_SUITE_P(Types, AdditiveTest,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                           DType::kFloat64),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

// keras.layers.AdditiveAttention(use_scale=True) of Keras 3.15.1 gives these weights and outputs
// within FP32's rounding; the digits are those of its formula in float64.
TEST(AdditiveGoldenTest, EqualsKeras) {
  const Problem problem{.batch = 1,
                        .query_heads = 1,
                        .kv_heads = 1,
                        .query_length = 2,
                        .key_length = 3,
                        .head_size = 3,
                        .value_head_size = 2,
                        .score_function = ScoreFunction::kAdditive,
                        .additive_weight = AdditiveWeight{},
                        .score_output = ScoreOutput::kWeights};
  const auto tensor = [](const Dims& dims, const std::vector<double>& numbers) {
    Tensor result(DType::kFloat32, dims);
    for (size_t n = 0; n < numbers.size(); ++n) {
      const auto at = static_cast<int64_t>(n);
      result.Set(0, 0, at / dims[3], at % dims[3], numbers[n]);
    }
    return result;
  };
  Inputs inputs;
  inputs.query = tensor({1, 1, 2, 3}, {0.5, -1, 2, 1.5, 0.25, -0.75});
  inputs.key = tensor({1, 1, 3, 3}, {1, 0.5, -2, -0.5, 1, 0, 0.25, -1.5, 1});
  inputs.value = tensor({1, 1, 3, 2}, {1, 2, 3, -4, -5, 6});
  inputs.additive_weight = Tensor(DType::kFloat32, {1, 3, 1, 1});
  for (int64_t d = 0; d < 3; ++d) {
    inputs.additive_weight->Set(0, d, 0, 0, std::vector<double>{0.5, -1.5, 2}[d]);
  }
  const Tolerance tolerance{ToleranceOf(DType::kFloat32), {}};
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = RunAttention(problem, inputs, target.Options()).value();
    EXPECT_TRUE(AllClose("weights", *got.scores,
                         {0.05805266780918374, 0.12693256505514094, 0.8150147671356752,
                          0.0091179441029287, 0.01207882347454132, 0.97880323242253},
                         tolerance));
    EXPECT_TRUE(
        AllClose("output", got.output,
                 {-3.6362234727037697, 4.498463678211855, -4.848661747586097, 5.842739988842872},
                 tolerance));
  }
}

Problem Large() {
  return {.batch = 1,
          .query_heads = 8,
          .kv_heads = 8,
          .query_length = 128,
          .key_length = 128,
          .head_size = 256,
          .value_head_size = 256,
          .score_function = ScoreFunction::kAdditive,
          .additive_weight = AdditiveWeight{.heads = 8}};
}

TEST(AdditiveLargeTest, IsAccurateForManyElements) {
  Problem problem = Large();
  problem.query_heads = problem.kv_heads = problem.additive_weight->heads = 1;
  problem.score_output = ScoreOutput::kScores;
  for (const double magnitude : {0.01, 1.0, 5.0, 20.0}) {
    Rng rng(kSeed);
    ExpectConforms(problem, RandomInputs(problem, rng, {}, magnitude));
  }
}

TEST(AdditiveTextTest, AProblemOfTextHasOneRowOfWeights) {
  const Problem problem = ParseProblems("1x8x128x256 score_function=additive").value()[0];
  EXPECT_EQ(problem.score_function, ScoreFunction::kAdditive);
  EXPECT_EQ(problem.additive_weight->heads, 1);
  EXPECT_EQ(problem.effective_scale(), 1);
  EXPECT_FALSE(ParseProblems("1x8x128x256 score_function=concat").ok());
}

TEST(AdditiveLargeTest, MemoryIsThatOfDotProductsAndTheExponentialsOfQ) {
  const Problem problem = Large();
  Problem dot = problem;
  dot.score_function = ScoreFunction::kDotProduct;
  dot.additive_weight.reset();
  const int64_t queries = 8 * 128 * 256 * int64_t{sizeof(float)};
  const PlanOptions options = {.backend = "cpu", .isa = "portable"};  // AMX has scratch for tiles
  const int64_t added = MakePlan(problem, options).value().workspace_bytes() -
                        MakePlan(dot, options).value().workspace_bytes();
  EXPECT_GT(added, 0);
  EXPECT_LT(added, 2 * queries);
}

}  // namespace
}  // namespace rapt::test
