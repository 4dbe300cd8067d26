// Biases by distance on every backend and instruction set, in every type.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/score/relative_tables.h"
#include "tests/support/run_attention.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr uint64_t kSeed = 20241125;
constexpr int64_t kQueries = 17;
constexpr int64_t kKeys = 70;

// The ways to give a bias by distance.
std::vector<Problem> WithEachBias(const Problem& problem) {
  std::vector<Problem> problems(7, problem);
  problems[0].alibi = true;
  problems[1].alibi_slopes = AlibiSlopes{problem.dtype, 1};
  problems[2].alibi_slopes = AlibiSlopes{DType::kFloat32, problem.batch};
  problems[3].bias_table = BiasTable{DType::kFloat32, 9};
  problems[4].bias_table = BiasTable{problem.dtype, 8};
  problems[4].is_bidirectional = true;
  problems[4].max_distance = 20;
  problems[5].relative_bias = RelativeBias{problem.dtype, problem.query_heads, 11};
  problems[6].relative_bias = RelativeBias{DType::kFloat32, 1, 1};
  return problems;
}

class RelativeTest : public ::testing::TestWithParam<DType> {
 protected:
  static Problem Make() {
    return {.dtype = GetParam(),
            .batch = 2,
            .query_heads = 6,  // not a power of two, for the slopes
            .kv_heads = 2,
            .query_length = kQueries,
            .key_length = kKeys,
            .head_size = 24,
            .value_head_size = 17,
            .wants_lse = true};
  }
};

TEST_P(RelativeTest, MatchesTheDefinition) {
  std::vector<Problem> places(7, Make());
  places[1].causal = true;
  places[1].alignment = Alignment::kBottomRight;
  places[2].past_length = 9;
  places[2].softcap = 3;
  places[3].has_key_lengths = true;
  places[3].alignment = Alignment::kOnnx;
  places[3].left_window = 12;
  places[4].mask = MaskShape{DType::kBool, {1, 1, kQueries, kKeys}};
  places[4].score_output = ScoreOutput::kWeights;
  places[5].bias = MaskShape{GetParam(), {2, 1, kQueries, kKeys - 2}};
  places[5].mask = MaskShape{GetParam(), {1, 6, 1, kKeys}};
  places[5].score_output = ScoreOutput::kBiased;
  places[6].query_length = 1;  // in place
  places[6].past_length = 69;
  places[6].wants_present = true;
  Rng rng(kSeed);
  for (const Problem& place : places) {
    for (const Problem& problem : WithEachBias(place)) {
      ExpectConforms(problem, RandomInputs(problem, rng));
    }
  }
}

TEST_P(RelativeTest, MatchesTheDefinitionWithSplitKeys) {
  Problem problem = Make();
  problem.query_heads = 2;
  problem.kv_heads = 1;
  problem.query_length = 2;
  problem.key_length = 2200;
  problem.has_key_lengths = true;
  problem.alignment = Alignment::kBottomRight;
  Rng rng(kSeed);
  for (const Problem& biased : WithEachBias(problem)) {
    ExpectConforms(biased, RandomInputs(biased, rng), /*threads=*/16);
  }
}

// The same numbers as one attention_bias of Sq * T.
TEST_P(RelativeTest, EqualsAttentionBias) {
  Problem problem = Make();
  problem.causal = true;
  problem.relative_bias = RelativeBias{GetParam(), problem.query_heads, 2 * kKeys + 1};
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(problem, rng);
  Problem biased = problem;
  biased.relative_bias.reset();
  biased.bias = MaskShape{GetParam(), {1, problem.query_heads, kQueries, kKeys}};
  Inputs with_bias = inputs;
  with_bias.bias = Tensor(GetParam(), biased.bias->dims);
  for (int64_t h = 0; h < problem.query_heads; ++h) {
    for (int64_t i = 0; i < kQueries; ++i) {
      for (int64_t j = 0; j < kKeys; ++j) {
        with_bias.bias->Set(0, h, i, j, inputs.relative_bias->At(h, kKeys + j - i, 0, 0));
      }
    }
  }
  ExpectSameOutputs(problem, inputs, biased, with_bias);
}

TEST_P(RelativeTest, MinusInfinityHidesAKey) {
  // A window of 3 keys on each side, as a table; V beyond it is NaN.
  Problem problem = Make();
  problem.query_length = 1;
  problem.past_length = 30;  // the query's position
  problem.relative_bias = RelativeBias{DType::kFloat32, 1, 9};
  Problem window = problem;
  window.relative_bias.reset();
  window.left_window = window.right_window = 3;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.relative_bias->Fill(0);
  inputs.relative_bias->Set(0, 0, 0, 0, -kInf);
  inputs.relative_bias->Set(0, 8, 0, 0, -kInf);
  Inputs poisoned = inputs;
  const double nan = std::numeric_limits<double>::quiet_NaN();
  for (int64_t j = 0; j < problem.past_length - 3; ++j) poisoned.past_value->Set(0, 0, j, 0, nan);
  for (int64_t j = 4; j < kKeys; ++j) poisoned.value.Set(0, 0, j, 0, nan);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const PlanOptions options = {.backend = target.backend, .isa = target.isa};
    const Outputs got = RunAttention(problem, poisoned, options).value();
    EXPECT_TRUE(Matches(window, got, Attend(window, inputs)));
  }
}

TEST_P(RelativeTest, AKeyHiddenByTheTableStaysHiddenWhateverIsAdded) {
  Problem problem = Make();
  problem.mask = MaskShape{DType::kFloat32, {1, 1, 1, kKeys}};
  problem.relative_bias = RelativeBias{DType::kFloat32, 1, 1};
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.relative_bias->Fill(-kInf);
  inputs.mask->Fill(kInf);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const PlanOptions options = {.backend = target.backend, .isa = target.isa};
    const Outputs got = RunAttention(problem, inputs, options).value();
    EXPECT_THAT(got.output.ToVector(), Each(0));
    EXPECT_THAT(got.lse->ToVector(), Each(-kInf));
  }
}

TEST_P(RelativeTest, AFiniteBiasBeyondFp32HidesNoKey) {
  Problem problem = Make();
  problem.key_length = 1;
  problem.past_length = 100;
  problem.left_window = 50;
  problem.right_window = -1;
  problem.has_key_lengths = true;
  problem.alibi_slopes = AlibiSlopes{DType::kFloat32, 1};
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.alibi_slopes->Fill(3e38);
  inputs.key_lengths = {0, 0};
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const PlanOptions options = {.backend = target.backend, .isa = target.isa};
    const Outputs got = RunAttention(problem, inputs, options).value();
    for (const double lse : got.lse->ToVector()) EXPECT_TRUE(std::isfinite(lse) || lse < -1e38);
    for (const double y : got.output.ToVector()) EXPECT_FALSE(std::isnan(y));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, RelativeTest,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                           DType::kFloat64),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

// The buckets of distances [first, first + count) of one head: table entry n is n.
std::vector<double> Buckets(int64_t buckets, bool is_bidirectional, int64_t max_distance,
                            int64_t position, int64_t count) {
  Problem problem{.dtype = DType::kFloat64,
                  .batch = 1,
                  .query_heads = 1,
                  .kv_heads = 1,
                  .query_length = 1,
                  .key_length = count - position,
                  .past_length = position,
                  .head_size = 1,
                  .value_head_size = 1,
                  .bias_table = BiasTable{DType::kFloat32, buckets},
                  .is_bidirectional = is_bidirectional,
                  .max_distance = max_distance};
  Tensor table(DType::kFloat32, {buckets, 1, 1, 1});
  for (int64_t n = 0; n < buckets; ++n) table.Set(n, 0, 0, 0, static_cast<double>(n));
  Arguments arguments;
  arguments.inputs[Role::kBiasTable] = table.View();
  std::vector<double> biases(count);
  RelativeRow(problem, arguments, 0, 0, 0, absl::MakeSpan(biases));
  return biases;
}

// transformers' T5Attention._relative_position_bucket(arange(-130, 130), ...).
TEST(RelativeTableTest, HasTheBucketsOfT5) {
  const std::vector<double> both = Buckets(32, true, 128, 130, 260);
  // The first distances of buckets 8 to 15: 8 * 16^(k / 8), rounded up.
  const int64_t edges[] = {8, 12, 16, 23, 32, 46, 64, 91};
  for (int64_t d = 0; d < 130; ++d) {
    int64_t bucket = std::min<int64_t>(d, 7);
    for (int64_t k = 0; k < 8 && d >= edges[k]; ++k) bucket = 8 + k;
    EXPECT_EQ(both[130 - d], bucket) << d;
    if (d > 0) {
      EXPECT_EQ(both[130 + d], 16 + bucket) << d;
    }
  }
  const std::vector<double> causal = Buckets(32, false, 128, 130, 260);
  EXPECT_THAT(std::vector<double>(causal.begin() + 130, causal.end()), Each(0));
  for (int64_t d = 0; d < 16; ++d) EXPECT_EQ(causal[130 - d], d);
  // 16 * 8^(k / 16), rounded up.
  const int64_t causal_edges[] = {16, 19, 21, 24, 27, 31, 35, 40, 46, 52, 59, 67, 77, 87, 99, 113};
  for (int64_t d = 16; d < 130; ++d) {
    int64_t bucket = 15;
    for (int64_t k = 0; k < 16 && d >= causal_edges[k]; ++k) bucket = 16 + k;
    EXPECT_EQ(causal[130 - d], bucket) << d;
  }
}

TEST(RelativeTableTest, HasTheSlopesOfAlibi) {
  const auto slopes = [](int64_t heads) {
    const Problem problem{.dtype = DType::kFloat64,
                          .batch = 1,
                          .query_heads = heads,
                          .kv_heads = heads,
                          .query_length = 1,
                          .key_length = 2,
                          .head_size = 1,
                          .value_head_size = 1,
                          .alibi = true};
    std::vector<double> slopes;
    for (int64_t h = 0; h < heads; ++h) {
      double row[2];
      RelativeRow(problem, {}, 0, h, 0, absl::MakeSpan(row));
      slopes.push_back(-row[1]);
    }
    return slopes;
  };
  EXPECT_THAT(slopes(1), ElementsAre(0x1p-8));
  EXPECT_THAT(slopes(4), ElementsAre(0x1p-2, 0x1p-4, 0x1p-6, 0x1p-8));
  // Those of 4 heads, then the first and third of 8.
  EXPECT_THAT(slopes(6), ElementsAre(0x1p-2, 0x1p-4, 0x1p-6, 0x1p-8, 0x1p-1, 0x1p-3));
}

TEST(RelativeTableTest, MemoryIsLinearInTheLengths) {
  Problem problem{.batch = 4,
                  .query_heads = 8,
                  .kv_heads = 8,
                  .query_length = 1000,
                  .key_length = 3000,
                  .head_size = 64,
                  .value_head_size = 64};
  const int64_t without = MakePlan(problem, {}).value().workspace_bytes();
  problem.alibi = true;
  EXPECT_LE(MakePlan(problem, {}).value().workspace_bytes() - without, 8 * 4000 * 4 + 128);
}

}  // namespace
}  // namespace rapt::test
