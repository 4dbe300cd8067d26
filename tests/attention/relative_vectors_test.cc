// relative_keys, relative_values and relative_query on every backend and instruction set, in every
// type.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/diagnosis.h"
#include "base/thread_pool.h"
#include "tests/support/run_attention.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr uint64_t kSeed = 20241127;
constexpr int64_t kQueries = 53;
constexpr int64_t kKeys = 150;

// The ways to give vectors by distance.
std::vector<Problem> WithEachTable(const Problem& problem) {
  std::vector<Problem> problems(5, problem);
  problems[0].relative_keys = RelativeVectors{problem.dtype, problem.query_heads, 17};
  problems[1].relative_values = RelativeVectors{problem.dtype, problem.query_heads, 9};
  problems[2].relative_keys = RelativeVectors{DType::kFloat32, 1, 601};  // beyond any distance
  problems[2].relative_values = RelativeVectors{DType::kFloat32, 1, 601};
  problems[3].relative_keys = RelativeVectors{problem.dtype, problem.query_heads, 161};
  problems[3].relative_values = RelativeVectors{DType::kFloat32, 1, 1};
  problems[3].has_relative_query = true;
  problems[4].relative_keys = RelativeVectors{DType::kFloat32, 1, 3};
  problems[4].relative_values = RelativeVectors{problem.dtype, problem.query_heads, 131};
  problems[4].has_relative_query = true;
  return problems;
}

class RelativeVectorsTest : public ::testing::TestWithParam<DType> {
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

TEST_P(RelativeVectorsTest, MatchesTheDefinition) {
  std::vector<Problem> places(6, Make());
  places[1].causal = true;
  places[1].alignment = Alignment::kBottomRight;
  places[1].head_sink = DType::kFloat32;
  places[2].past_length = 9;
  places[2].softcap = 3;
  places[2].score_output = ScoreOutput::kScores;
  places[3].has_key_lengths = true;
  places[3].alignment = Alignment::kOnnx;
  places[3].left_window = 12;
  places[3].scale = 3;  // applied to the scores
  places[4].mask = MaskShape{DType::kBool, {1, 1, kQueries, kKeys}};
  places[4].score_output = ScoreOutput::kWeights;
  places[5].bias = MaskShape{GetParam(), {2, 1, kQueries, kKeys - 2}};
  places[5].dropout = Dropout{0.3, 5};
  places[5].relative_bias = RelativeBias{DType::kFloat32, 1, 7};
  places[5].score_output = ScoreOutput::kBiased;
  Rng rng(kSeed);
  for (const Problem& place : places) {
    for (const Problem& problem : WithEachTable(place)) {
      ExpectConforms(problem, RandomInputs(problem, rng));
    }
  }
}

TEST_P(RelativeVectorsTest, MatchesTheDefinitionWithAdditiveScores) {
  Problem problem = Make();
  problem.score_function = ScoreFunction::kAdditive;
  problem.additive_weight = AdditiveWeight{GetParam(), 4};
  problem.relative_values = RelativeVectors{GetParam(), 4, 33};
  Rng rng(kSeed);
  ExpectConforms(problem, RandomInputs(problem, rng));
}

// The query of the relative keys is Q after rotation, unless it is given.
TEST_P(RelativeVectorsTest, MatchesTheDefinitionWithRotaryEmbedding) {
  Problem problem = Make();
  problem.rope_theta = 100;
  problem.past_length = 3;
  Rng rng(kSeed);
  for (const Problem& relative : WithEachTable(problem)) {
    ExpectConforms(relative, RandomInputs(relative, rng));
  }
}

// Tasks of few rows read keys in place; those of several heads use several tables.
TEST_P(RelativeVectorsTest, MatchesTheDefinitionForFewQueries) {
  std::vector<Problem> places(4, Make());
  places[0].query_length = 1;
  places[0].past_length = 69;
  places[0].wants_present = true;
  places[1].query_length = 3;
  places[1].query_heads = 12;
  places[1].kv_heads = 1;
  places[1].alignment = Alignment::kBottomRight;
  places[2].query_length =
      30;  // a row block has the last queries of a head and the first of another
  places[2].query_heads = 6;
  places[2].kv_heads = 1;
  places[2].key_length = 40;
  places[3].query_heads = 6;
  places[3].query_length = 2;
  places[3].kv_heads = 1;
  places[3].values_in_keys = true;
  places[3].past_length = 40;
  places[3].causal = true;
  Rng rng(kSeed);
  for (const Problem& place : places) {
    for (const Problem& problem : WithEachTable(place)) {
      ExpectConforms(problem, RandomInputs(problem, rng));
    }
  }
}

TEST_P(RelativeVectorsTest, MatchesTheDefinitionWithSplitKeys) {
  Problem problem = Make();
  problem.query_heads = 2;
  problem.kv_heads = 1;
  problem.query_length = 2;
  problem.key_length = 2200;
  problem.has_key_lengths = true;
  problem.alignment = Alignment::kBottomRight;
  Rng rng(kSeed);
  for (const Problem& relative : WithEachTable(problem)) {
    ExpectConforms(relative, RandomInputs(relative, rng), /*threads=*/16);
  }
}

TEST_P(RelativeVectorsTest, MatchesTheDefinitionInAnyStorage) {
  Problem problem = Make();
  problem.query_length = 13;
  Rng rng(kSeed);
  for (const Storage table :
       {Storage::kTransposed, Storage::kElementsApart, Storage::kMisaligned}) {
    for (const Storage query : {Storage::kBshd, Storage::kPaddedRows}) {
      for (const Problem& relative : WithEachTable(problem)) {
        ExpectConforms(relative, RandomInputs(relative, rng, {.query = query, .mask = table}));
      }
    }
  }
}

TEST_P(RelativeVectorsTest, EmptyTensors) {
  for (int64_t Problem::*const axis :
       {&Problem::batch, &Problem::query_length, &Problem::key_length}) {
    Problem problem = Make();
    problem.*axis = 0;
    Rng rng(kSeed);
    for (const Problem& relative : WithEachTable(problem)) {
      ExpectConforms(relative, RandomInputs(relative, rng));
    }
  }
}

// One query: the same as keys and values that have the vectors added.
TEST_P(RelativeVectorsTest, AddsVectorsToKeysAndValues) {
  Problem problem = Make();
  problem.query_length = 1;
  problem.alignment = Alignment::kBottomRight;  // the query is at the last key
  problem.relative_keys = RelativeVectors{GetParam(), 1, 2 * kKeys + 1};
  problem.relative_values = RelativeVectors{GetParam(), 1, 2 * kKeys + 1};
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(problem, rng);
  Inputs added = inputs;
  // In FP64, so that no sum is rounded.
  added.query = Tensor(DType::kFloat64, inputs.query.dims());
  added.key = Tensor(DType::kFloat64, inputs.key.dims());
  added.value = Tensor(DType::kFloat64, inputs.value.dims());
  const auto copy = [](const Tensor& from, const Tensor* table, Tensor& to) {
    const auto& [batch, heads, length, size] = from.dims();
    for (int64_t n = 0; n < from.size(); ++n) {
      const int64_t e = n % size, j = n / size % length, h = n / size / length % heads,
                    b = n / size / length / heads;
      const double vector = table == nullptr ? 0 : table->At(0, j + 1, e, 0);  // j - p = j + 1 - T
      to.Set(b, h, j, e, from.At(b, h, j, e) + vector);
    }
  };
  copy(inputs.query, nullptr, added.query);
  copy(inputs.key, &*inputs.relative_keys, added.key);
  copy(inputs.value, &*inputs.relative_values, added.value);
  added.relative_keys.reset();
  added.relative_values.reset();
  Problem plain = problem;
  plain.dtype = DType::kFloat64;
  plain.relative_keys.reset();
  plain.relative_values.reset();
  const Expected expected = Attend(plain, added);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = RunAttention(problem, inputs, target.Options()).value();
    EXPECT_TRUE(Matches(problem, got, expected));
  }
}

// c beyond every distance: neither the entries there nor the length of the table matter.
TEST_P(RelativeVectorsTest, IgnoresDistancesThatDoNotOccur) {
  Problem exact = Make();
  exact.relative_keys = exact.relative_values = RelativeVectors{GetParam(), 1, 2 * kKeys - 1};
  Problem longer = exact;
  longer.relative_keys = longer.relative_values = RelativeVectors{GetParam(), 1, 2 * kKeys + 99};
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(exact, rng);
  Inputs with_longer = inputs;
  const auto lengthen = [](const Tensor& table) {
    Tensor result(table.dtype(), {1, 2 * kKeys + 99, table.dims()[2], 1});
    result.Fill(kNan);
    for (int64_t n = 0; n < 2 * kKeys - 1; ++n) {
      for (int64_t d = 0; d < table.dims()[2]; ++d)
        result.Set(0, n + 50, d, 0, table.At(0, n, d, 0));
    }
    return result;
  };
  with_longer.relative_keys = lengthen(*inputs.relative_keys);
  with_longer.relative_values = lengthen(*inputs.relative_values);
  ExpectSameOutputs(exact, inputs, longer, with_longer);
}

// Vectors of distances that only hidden keys have.
TEST_P(RelativeVectorsTest, NanOfHiddenKeysDoesNotMatter) {
  std::vector<Problem> places(3, Make());
  places[0].causal = true;
  places[1].causal = true;  // in place
  places[1].query_length = 2;
  places[1].past_length = 90;
  places[2].causal = true;
  places[2].mask = MaskShape{DType::kBool, {1, 1, kQueries, kKeys}};
  places[2].score_output = ScoreOutput::kWeights;
  Rng rng(kSeed);
  for (Problem& problem : places) {
    problem.left_window = 20;
    for (const int64_t heads : {int64_t{1}, problem.query_heads}) {
      problem.relative_keys = problem.relative_values = RelativeVectors{GetParam(), heads, 61};
      const Inputs inputs = RandomInputs(problem, rng);
      Inputs poisoned = inputs;
      for (int64_t h = 0; h < heads; ++h) {
        for (int64_t n = 0; n < 61; ++n) {
          if (n >= 10 && n <= 30) continue;
          poisoned.relative_keys->Set(h, n, n % 7, 0, n % 2 == 0 ? kNan : kInf);
          poisoned.relative_values->Set(h, n, n % 5, 0, n % 2 == 0 ? kNan : -kInf);
        }
      }
      const Expected expected = Attend(problem, inputs);
      for (const Target& target : Targets()) {
        SCOPED_TRACE(target.Name() + " " + ToText(problem));
        const Outputs got = RunAttention(problem, poisoned, target.Options()).value();
        if (problem.score_output != ScoreOutput::kScores) {
          EXPECT_TRUE(Matches(problem, got, expected)) << got.plan;
        }
      }
    }
  }
}

TEST_P(RelativeVectorsTest, NanOfVisibleKeysPropagates) {
  Problem problem = Make();
  problem.relative_values = RelativeVectors{GetParam(), 1, 5};
  problem.right_window = 1;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.relative_values->Set(0, 3, 2, 0, kNan);  // of the key after the query
  ExpectConforms(problem, inputs);
}

// In Transformer-XL the two queries are q + u and q + v.
TEST_P(RelativeVectorsTest, TheRelativeQueryDefaultsToQ) {
  Problem problem = Make();
  problem.relative_keys = RelativeVectors{GetParam(), 4, 33};
  Problem with_query = problem;
  with_query.has_relative_query = true;
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(problem, rng);
  Inputs same = inputs;
  same.relative_query = inputs.query;
  ExpectSameOutputs(problem, inputs, with_query, same);
}

INSTANTIATE_TEST_SUITE_P(Types, RelativeVectorsTest,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                           DType::kFloat64),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

Problem Large() {
  return {.batch = 4,
          .query_heads = 8,
          .kv_heads = 8,
          .query_length = 1000,
          .key_length = 3000,
          .head_size = 64,
          .value_head_size = 64};
}

TEST(RelativeVectorsPlanTest, MemoryIsLinearInTheLengths) {
  Problem problem = Large();
  const int64_t without = MakePlan(problem, {}).value().workspace_bytes();
  problem.relative_keys = problem.relative_values = RelativeVectors{.length = (1 << 30) + 1};
  constexpr int64_t kScratch = 1 << 20;  // for each of one thread
  EXPECT_LE(MakePlan(problem, {.isa = "portable"}).value().workspace_bytes() - without,
            2 * 64 * 4100 * 4 + kScratch);
}

TEST(RelativeVectorsPlanTest, CountsTheProductsOfBothTables) {
  Problem problem = Large();
  const double without = MakePlan(problem, {}).value().flops;
  problem.relative_keys = problem.relative_values = RelativeVectors{};
  EXPECT_EQ(MakePlan(problem, {}).value().flops, 2 * without);
}

TEST(RelativeVectorsValidateTest, TablesOfAnySizeArePlannedOrRefused) {
  for (const int64_t heads : {int64_t{1}, int64_t{1} << 20}) {
    for (const int64_t length : {int64_t{1}, (int64_t{1} << 40) - 1}) {
      for (const int64_t size : {int64_t{1}, int64_t{1} << 24}) {
        Problem problem{.batch = 1,
                        .query_heads = heads,
                        .kv_heads = 1,
                        .query_length = 1,
                        .key_length = 1,
                        .head_size = size,
                        .value_head_size = size};
        problem.relative_keys = problem.relative_values =
            RelativeVectors{.heads = heads, .length = length};
        const absl::StatusOr<Plan> plan = MakePlan(problem, {});
        if (plan.ok()) {
          EXPECT_GE(plan->workspace_bytes(), 0);
          continue;
        }
        EXPECT_THAT(std::string(plan.status().message()),
                    AllOf(HasSubstr("relative_keys"), HasSubstr("overflows")));
      }
    }
  }
}

TEST(RelativeVectorsDiagnosisTest, ScoresIncludeTheVectors) {
  Problem problem{.batch = 1,
                  .query_heads = 1,
                  .kv_heads = 1,
                  .query_length = 2,
                  .key_length = 2,
                  .head_size = 1,
                  .value_head_size = 1,
                  .scale = 1};
  problem.relative_keys = RelativeVectors{.length = 3};
  problem.has_relative_query = true;
  const auto ones = [](Dims dims) { return Tensor(DType::kFloat32, dims).Fill(1); };
  const Tensor q = ones({1, 1, 2, 1});
  Tensor table(DType::kFloat32, {1, 3, 1, 1});
  for (int64_t n = 0; n < 3; ++n) table.Set(0, n, 0, 0, static_cast<double>(10 * n));
  Arguments arguments;
  for (Role role : {Role::kQ, Role::kK, Role::kV, Role::kRelativeQuery}) {
    arguments.inputs[role] = q.View();
  }
  arguments.inputs[Role::kRelativeKeys] = table.View();
  ThreadPool pool(1);
  const DiagnosisReport report = Diagnose(problem, arguments, {}, pool).value();
  EXPECT_EQ(report.raw_scores.min, 1);  // the key before the query: 1 + 0
  EXPECT_EQ(report.raw_scores.max, 21);
  EXPECT_THAT(report.problem,
              AllOf(HasSubstr(" relative_keys=FP32[1,3,1]"), HasSubstr(" relative_query")));
}

}  // namespace
}  // namespace rapt::test
