// Sparsemax and entmax on every backend and instruction set, in every type.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr uint64_t kSeed = 20251123;
constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64};

struct NormalizerCase {
  DType dtype;
  Normalizer normalizer;
  double alpha = 0;  // of kEntmax
};

std::string NameOf(const NormalizerCase& c) {
  std::string name = std::string(rapt::NameOf(c.dtype)) + std::string(rapt::NameOf(c.normalizer));
  if (c.normalizer == Normalizer::kEntmax) name += std::to_string(std::lround(c.alpha * 1000));
  return name;
}

std::vector<NormalizerCase> Cases() {
  std::vector<NormalizerCase> cases;
  for (DType dtype : kTypes) {
    cases.push_back({dtype, Normalizer::kSparsemax});
    cases.push_back({dtype, Normalizer::kEntmax15});
    cases.push_back({dtype, Normalizer::kEntmax, 1.25});
  }
  cases.push_back({DType::kFloat32, Normalizer::kEntmax, 1.01});
  cases.push_back({DType::kFloat32, Normalizer::kEntmax, 1});
  cases.push_back({DType::kFloat32, Normalizer::kEntmax, 2});
  return cases;
}

class NormalizerTest : public ::testing::TestWithParam<NormalizerCase> {
 protected:
  // More than a block of rows and several blocks of keys, by default.
  static Problem Make(int64_t query_length = 53, int64_t key_length = 150) {
    Problem problem = {.dtype = GetParam().dtype,
                       .batch = 1,
                       .query_heads = 2,
                       .kv_heads = 1,
                       .query_length = query_length,
                       .key_length = key_length,
                       .head_size = 24,
                       .value_head_size = 17,
                       .scale = 1,
                       .normalizer = GetParam().normalizer};
    if (problem.normalizer == Normalizer::kEntmax) problem.alpha = GetParam().alpha;
    return problem;
  }

  static double AlphaOf(const Problem& problem) {
    if (problem.alpha) return *problem.alpha;
    return problem.normalizer == Normalizer::kSparsemax ? 2 : 1.5;
  }

  static bool IsSoftmax() {
    return GetParam().normalizer == Normalizer::kEntmax && GetParam().alpha == 1;
  }

  // Scores of about this magnitude.
  static Inputs InputsFor(const Problem& problem, double magnitude = 1,
                          const Arrangement& arrangement = {}) {
    Rng rng(kSeed);
    return RandomInputs(problem, rng, arrangement, magnitude);
  }
};

TEST_P(NormalizerTest, MatchesTheDefinition) {
  const Problem prefill = Make();
  Problem decode = Make(1, 70);
  decode.past_length = 66;
  decode.wants_present = true;
  Problem hidden = Make(50, 131);
  hidden.causal = true;
  hidden.left_window = 90;
  hidden.softcap = 5;
  hidden.mask = MaskShape{DType::kBool, {1, 2, 50, 131}};
  hidden.bias = MaskShape{DType::kFloat32, {1, 1, 1, 131}};
  Problem wide = Make(9, 80);
  wide.has_key_lengths = true;
  wide.value_head_size = 150;
  wide.alibi = true;
  wide.dropout = Dropout{0.4, 99};
  // Few rows and many, with candidates that are gathered without vectors by distance.
  Problem vectors = Make(50, 100);
  vectors.relative_keys = RelativeVectors{DType::kFloat32, 2, 33};
  vectors.relative_values = RelativeVectors{DType::kFloat32, 1, 21};
  Problem few_vectors = vectors;
  few_vectors.query_length = 2;
  Problem rotated = Make(50, 100);
  rotated.rope_theta = 100;
  rotated.score_function = ScoreFunction::kAdditive;
  rotated.additive_weight = AdditiveWeight{};
  rotated.head_size = 16;
  // Whole blocks of keys are skipped; a window with exemptions shows more keys than it is wide.
  Problem blocks = Make(50, 300);
  blocks.block_mask = {1, 2, 4, 5};
  blocks.block_q = 16;
  blocks.block_k = 64;
  Problem exempt = Make(50, 300);
  exempt.left_window = exempt.right_window = 2;
  exempt.prefix_keys = 100;
  exempt.has_global_mask = true;
  Problem selected = Make(20, 100);
  selected.selected = SelectedIndices{1, 12};
  for (const Problem& problem :
       {prefill, decode, hidden, wide, vectors, few_vectors, rotated, blocks, exempt, selected}) {
    for (const Storage storage : {Storage::kRowMajor, Storage::kMisaligned}) {
      ExpectConforms(problem, InputsFor(problem, 1, {storage, storage, storage}), 3);
    }
  }
}

// The threshold rises or falls from block to block of keys, and all rows have many candidates.
TEST_P(NormalizerTest, MatchesTheDefinitionWhateverTheOrderOfTheScores) {
  Problem problem = Make(49, 260);
  for (double slope : {0.01, -0.01, 0.2, -0.2}) {
    problem.bias = MaskShape{DType::kFloat32, {1, 1, 1, 260}};
    Inputs inputs = InputsFor(problem, 0.3);
    for (int64_t j = 0; j < 260; ++j) {
      inputs.bias->Set(0, 0, 0, j, slope * static_cast<double>(j));
    }
    ExpectConforms(problem, inputs);
  }
}

TEST_P(NormalizerTest, MatchesTheDefinitionIfAllKeysHaveAWeight) {
  for (const int64_t queries : {3, 50}) {
    Problem problem = Make(queries, 260);
    problem.score_output = ScoreOutput::kWeights;
    ExpectConforms(problem, InputsFor(problem, 0.03));
  }
}

TEST_P(NormalizerTest, GivesEveryScoreOutput) {
  for (const ScoreOutput output : {ScoreOutput::kScores, ScoreOutput::kSoftcapped,
                                   ScoreOutput::kBiased, ScoreOutput::kWeights}) {
    for (const int64_t queries : {2, 51}) {
      Problem problem = Make(queries, 140);
      problem.causal = true;
      problem.alignment = Alignment::kBottomRight;
      problem.score_output = output;
      problem.dropout = Dropout{0.2, 5};
      ExpectConforms(problem, InputsFor(problem));
    }
  }
}

TEST_P(NormalizerTest, KeysBelowTheThresholdWeighExactlyZero) {
  if (IsSoftmax()) return;
  Problem problem = Make(20, 200);
  problem.score_output = ScoreOutput::kBiased;
  // Wide enough for the threshold of any alpha.
  problem.scale = 1 / (AlphaOf(problem) - 1);
  const Inputs inputs = InputsFor(problem);
  const std::vector<double> scores = Attend(problem, inputs).scores;
  problem.score_output = ScoreOutput::kWeights;
  const Expected expected = Attend(problem, inputs);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = RunAttention(problem, inputs, target.Options()).value();
    const std::vector<double> weights = got.scores->ToVector();
    int64_t zeros = 0;
    for (size_t row = 0; row < weights.size(); row += 200) {
      const auto begin = static_cast<std::ptrdiff_t>(row);
      double lightest = kInf;
      for (size_t j = row; j < row + 200; ++j) {
        if (expected.scores[j] > 0) lightest = std::min(lightest, scores[j]);
      }
      // Scores that are this far below a key with a weight have none, whatever the rounding.
      for (size_t j = row; j < row + 200; ++j) {
        if (expected.scores[j] > 0 || scores[j] > lightest - 1e-5 * *problem.scale) continue;
        EXPECT_EQ(weights[j], 0);
        ++zeros;
      }
      const double sum =
          std::accumulate(weights.begin() + begin, weights.begin() + begin + 200, 0.0);
      const double rounding = ToleranceOf(problem.dtype) < 1e-5 ? 1e-6 : ToleranceOf(problem.dtype);
      EXPECT_NEAR(sum, 1, rounding);
    }
    EXPECT_GT(zeros, 100);
  }
}

// NaN in the values of all keys that have no weight, whether values are gathered or multiplied.
TEST_P(NormalizerTest, ValuesOfKeysWithoutWeightDoNotMatter) {
  if (IsSoftmax()) return;
  for (const int64_t queries : {2, 60}) {
    for (const int64_t heavy : {4, 100}) {
      Problem problem = Make(queries, 200);
      problem.bias = MaskShape{DType::kFloat32, {1, 1, 1, 200}};
      Inputs inputs = InputsFor(problem, 0.05);
      for (int64_t j = 0; j < 200; ++j) {
        const bool has_weight = j % 2 == 1 && j < 2 * heavy;
        inputs.bias->Set(0, 0, 0, j, has_weight ? 0 : -1e4);
      }
      const Inputs clean = inputs;
      for (int64_t j = 0; j < 200; ++j) {
        if (inputs.bias->At(0, 0, 0, j) == 0) continue;
        for (int64_t d = 0; d < 17; ++d) inputs.value.Set(0, 0, j, d, j % 4 == 0 ? kNan : kInf);
      }
      const Expected expected = Attend(problem, clean);
      for (const Target& target : Targets()) {
        SCOPED_TRACE(target.Name());
        EXPECT_TRUE(
            Matches(problem, RunAttention(problem, inputs, target.Options()).value(), expected));
      }
    }
  }
}

TEST_P(NormalizerTest, NanAndInfinityPropagate) {
  for (const int64_t queries : {2, 60}) {
    for (const double bad : {kNan, kInf}) {
      for (const int64_t key : {0, 77, 199}) {
        Problem problem = Make(queries, 200);
        problem.score_output = ScoreOutput::kWeights;
        problem.bias = MaskShape{DType::kFloat32, {1, 1, queries, 200}};
        Inputs inputs = InputsFor(problem);
        inputs.bias->Fill(0);
        inputs.bias->Set(0, 0, 1, key, bad);
        for (const Target& target : Targets()) {
          SCOPED_TRACE(target.Name());
          const Outputs got = RunAttention(problem, inputs, target.Options()).value();
          EXPECT_TRUE(std::isnan(got.output.At(0, 1, 1, 0)));
          EXPECT_TRUE(std::isnan(got.scores->At(0, 1, 1, key)));
          EXPECT_FALSE(std::isnan(got.output.At(0, 1, 0, 0)));
        }
      }
    }
    // In the value of a key that has a weight.
    Problem problem = Make(queries, 200);
    Inputs inputs = InputsFor(problem, 0.01);
    inputs.value.Set(0, 0, 100, 3, kNan);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const Outputs got = RunAttention(problem, inputs, target.Options()).value();
      EXPECT_TRUE(std::isnan(got.output.At(0, 0, 1, 3)));
      EXPECT_FALSE(std::isnan(got.output.At(0, 0, 1, 2)));
    }
  }
}

TEST_P(NormalizerTest, RowsWithoutAKeyAreZeros) {
  Problem problem = Make(50, 10);
  problem.causal = true;
  problem.alignment = Alignment::kBottomRight;  // the first 40 queries see nothing
  problem.score_output = ScoreOutput::kWeights;
  ExpectConforms(problem, InputsFor(problem));
  Problem no_keys = Make(3, 0);
  ExpectConforms(no_keys, InputsFor(no_keys));
}

// Scores that differ by more than any weight can bridge, and masks of the most negative number.
TEST_P(NormalizerTest, HugeScoresShareEqually) {
  const double lowest = std::numeric_limits<float>::lowest();
  for (const double score : {1e30, -1e30, lowest}) {
    for (const int64_t queries : {2, 50}) {
      Problem problem = Make(queries, 130);
      problem.bias = MaskShape{DType::kFloat32, {1, 1, 1, 130}};
      problem.score_output = ScoreOutput::kWeights;
      Inputs inputs = InputsFor(problem, 0.01);
      inputs.bias->Fill(score);
      inputs.bias->Set(0, 0, 0, 100, -kInf);
      for (const Target& target : Targets()) {
        SCOPED_TRACE(target.Name() + " " + std::to_string(score));
        const Outputs got = RunAttention(problem, inputs, target.Options()).value();
        EXPECT_NEAR(got.scores->At(0, 1, 1, 129), 1.0 / 129, ToleranceOf(problem.dtype));
        EXPECT_EQ(got.scores->At(0, 1, 1, 100), 0);
        EXPECT_FALSE(std::isnan(got.output.At(0, 0, 0, 0)));
      }
    }
  }
}

TEST_P(NormalizerTest, AConstantAddedToAllScoresChangesNothing) {
  Problem problem = Make();
  problem.bias = MaskShape{DType::kFloat32, {1, 1, 1, 1}};
  Inputs inputs = InputsFor(problem);
  inputs.bias->Fill(0);
  const Expected expected = Attend(problem, inputs);
  inputs.bias->Fill(-6.5);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    EXPECT_TRUE(
        Matches(problem, RunAttention(problem, inputs, target.Options()).value(), expected));
  }
}

TEST_P(NormalizerTest, PermutingTheKeysChangesNothing) {
  const Problem problem = Make(20, 300);
  const Inputs inputs = InputsFor(problem);
  Inputs permuted = inputs;
  for (int64_t j = 0; j < 300; ++j) {
    const int64_t from = j * 7 % 300;
    for (int64_t d = 0; d < 24; ++d) permuted.key.Set(0, 0, j, d, inputs.key.At(0, 0, from, d));
    for (int64_t d = 0; d < 17; ++d) permuted.value.Set(0, 0, j, d, inputs.value.At(0, 0, from, d));
  }
  const Expected expected = Attend(problem, inputs);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    EXPECT_TRUE(
        Matches(problem, RunAttention(problem, permuted, target.Options()).value(), expected));
  }
}

INSTANTIATE_TEST_SUITE_P(Cases, NormalizerTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return NameOf(info.param); });

Problem Plain() {
  return {.batch = 1,
          .query_heads = 4,
          .kv_heads = 2,
          .query_length = 20,
          .key_length = 200,
          .head_size = 16,
          .value_head_size = 16};
}

Inputs InputsOf(const Problem& problem) {
  Rng rng(kSeed);
  return RandomInputs(problem, rng);
}

TEST(NormalizerExamplesTest, SparsemaxByHand) {
  Problem problem = {.batch = 1,
                     .query_heads = 1,
                     .kv_heads = 1,
                     .query_length = 1,
                     .key_length = 3,
                     .head_size = 1,
                     .value_head_size = 2,
                     .scale = 1,
                     .normalizer = Normalizer::kSparsemax,
                     .score_output = ScoreOutput::kWeights};
  Inputs inputs = InputsOf(problem);
  inputs.query.Set(0, 0, 0, 0, 1);
  const double values[3][2] = {{4, 8}, {8, -4}, {kNan, 1}};
  for (int64_t j = 0; j < 3; ++j) {
    inputs.key.Set(0, 0, j, 0, 1 - 0.5 * static_cast<double>(j));
    for (int64_t d = 0; d < 2; ++d) inputs.value.Set(0, 0, j, d, values[j][d]);
  }
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = RunAttention(problem, inputs, target.Options()).value();
    EXPECT_THAT(got.scores->ToVector(), ElementsAre(0.75, 0.25, 0));
    EXPECT_THAT(got.output.ToVector(), ElementsAre(5, 5));
  }
}

TEST(NormalizerExamplesTest, EachHeadHasItsAlpha) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    for (const int64_t queries : {1, 100}) {
      Problem problem = Plain();
      problem.dtype = dtype;
      problem.query_length = queries;
      problem.normalizer = Normalizer::kEntmax;
      problem.head_alpha = dtype;
      problem.score_output = ScoreOutput::kWeights;
      Inputs inputs = InputsOf(problem);
      for (int64_t h = 0; h < 4; ++h) {
        inputs.head_alpha->Set(h, 0, 0, 0, std::vector<double>{1, 1.5, 1.75, 2}[h]);
      }
      ExpectConforms(problem, inputs, 2);
    }
  }
}

TEST(NormalizerExamplesTest, AlphaOfOneIsSoftmaxToTheBit) {
  for (const int64_t queries : {1, 100}) {
    Problem softmax = Plain();
    softmax.query_length = queries;
    Problem entmax = softmax;
    entmax.normalizer = Normalizer::kEntmax;
    entmax.alpha = 1;
    const Inputs inputs = InputsOf(softmax);
    for (const Target& target : Targets()) {
      if (target.MayUseTiles(softmax.dtype)) continue;
      SCOPED_TRACE(target.Name());
      EXPECT_TRUE(SameBits(RunAttention(softmax, inputs, target.Options()).value(),
                           RunAttention(entmax, inputs, target.Options()).value()));
    }
  }
}

TEST(NormalizerExamplesTest, AlphaNearOneMeetsSoftmax) {
  Problem softmax = Plain();
  const Inputs inputs = InputsOf(softmax);
  const Expected expected = Attend(softmax, inputs);
  Problem entmax = softmax;
  entmax.normalizer = Normalizer::kEntmax;
  for (const double alpha : {1 + 1e-6, 1 + 0x1p-40, 1 + 0x1p-52}) {
    entmax.alpha = alpha;
    const Tolerance allowed{ToleranceOf(DType::kFloat32) + 20 * (alpha - 1), {}};
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const Outputs got = RunAttention(entmax, inputs, target.Options()).value();
      EXPECT_TRUE(AllClose("output", got.output, expected.output, allowed));
    }
  }
}

TEST(NormalizerExamplesTest, EntmaxOfTwoAndOneAndAHalfAreSparsemaxAndEntmax15) {
  for (const auto& [normalizer, alpha] :
       {std::pair{Normalizer::kSparsemax, 2.0}, {Normalizer::kEntmax15, 1.5}}) {
    Problem named = Plain();
    named.normalizer = normalizer;
    Problem general = Plain();
    general.normalizer = Normalizer::kEntmax;
    general.alpha = alpha;
    const Inputs inputs = InputsOf(named);
    ExpectSameOutputs(named, inputs, general, inputs);
  }
}

// Without an lse, parts of the keys cannot be merged.
TEST(NormalizerExamplesTest, KeysAreNotSplit) {
  Problem problem = Plain();
  problem.query_length = 1;
  problem.key_length = 20000;
  const PlanOptions options = {.threads = 16};
  EXPECT_THAT(MakePlan(problem, options)->Describe(), Not(EndsWith(" s1")));
  problem.normalizer = Normalizer::kEntmax15;
  EXPECT_THAT(MakePlan(problem, options)->Describe(), EndsWith(" s1"));
}

// The candidates of a row are at most the keys that it sees.
TEST(NormalizerExamplesTest, WorkspaceIsLinearInTheVisibleKeys) {
  Problem problem = Plain();
  problem.query_length = 4096;
  problem.normalizer = Normalizer::kSparsemax;
  const auto bytes = [&](int64_t keys) {
    problem.key_length = keys;
    return MakePlan(problem, {})->workspace_bytes();
  };
  const int64_t at_64k = bytes(1 << 16);
  EXPECT_LT(at_64k, 48 * (1 << 16) * 8 + (1 << 20));
  EXPECT_LT(bytes(1 << 17), 2 * at_64k);
  problem.causal = true;
  problem.left_window = 1000;
  EXPECT_LT(bytes(1 << 17), 8 << 20);
}

TEST(NormalizerExamplesTest, RefusesWhatItCannotCombine) {
  using Change = void (*)(Problem&);
  const std::pair<Change, std::vector<std::string>> cases[] = {
      {[](Problem& p) { p.wants_lse = true; }, {"lse", "normalizer is entmax15", "softmax"}},
      {[](Problem& p) { p.head_sink = DType::kFloat32; }, {"head_sink", "normalizer is entmax15"}},
      {[](Problem& p) { p.alpha = 1.5; }, {"alpha is set", "normalizer is entmax15", "entmax"}},
      {[](Problem& p) { p.head_alpha = DType::kFloat32; }, {"alpha is set", "entmax15"}},
      {[](Problem& p) { p.normalizer = Normalizer::kEntmax; }, {"alpha is missing"}},
      {[](Problem& p) {
         p.normalizer = Normalizer::kEntmax;
         p.alpha = 1.5;
         p.head_alpha = DType::kFloat32;
       },
       {"alpha is given twice"}},
      {[](Problem& p) {
         p.normalizer = Normalizer::kEntmax;
         p.head_alpha = DType::kFloat64;
       },
       {"alpha has type FP64", "FP32"}},
      {[](Problem& p) {
         p.normalizer = Normalizer::kEntmax;
         p.alpha = 2.5;
       },
       {"alpha is 2.5", "from 1"}},
      {[](Problem& p) {
         p.normalizer = Normalizer::kEntmax;
         p.alpha = kNan;
       },
       {"alpha is nan", "from 1"}},
      {[](Problem& p) {
         p.section = Section{0, 0, 20, 200, 0};
         p.folds = true;
       },
       {"normalizer is entmax15", "all keys"}},
  };
  for (const auto& [change, parts] : cases) {
    Problem problem = Plain();
    problem.normalizer = Normalizer::kEntmax15;
    ASSERT_TRUE(Validate(problem).ok());
    change(problem);
    const absl::Status status = Validate(problem);
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    for (const std::string& part : parts) EXPECT_THAT(status.message(), HasSubstr(part));
  }
}

TEST(NormalizerExamplesTest, RefusesAnAlphaOutOfRangeInTheTensor) {
  Problem problem = Plain();
  problem.normalizer = Normalizer::kEntmax;
  problem.head_alpha = DType::kFloat32;
  for (const double bad : {0.99, 2.01, -1.0, kInf, kNan}) {
    Inputs inputs = InputsOf(problem);
    inputs.head_alpha->Set(2, 0, 0, 0, bad);
    const absl::Status status = RunAttention(problem, inputs, Targets()[0].Options()).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status));
    EXPECT_THAT(status.message(), AllOf(HasSubstr("alpha[2] is "), HasSubstr("from 1")));
  }
}

}  // namespace
}  // namespace rapt::test
