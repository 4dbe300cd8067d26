#include "attention/diagnosis.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/backend.h"
#include "attention/cudnn/cudnn_backend.h"
#include "base/thread_pool.h"
#include "tests/support/oracle.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Problem Square(int64_t length, int64_t size = 4) {
  return {.batch = 1,
          .query_heads = 1,
          .kv_heads = 1,
          .query_length = length,
          .key_length = length,
          .head_size = size,
          .value_head_size = size};
}

// Returns every tensor of the problem, filled with different small numbers.
Inputs SomeInputs(const Problem& problem) {
  Rng rng(7);
  return RandomInputs(problem, rng);
}

// Without outputs, which a diagnosis does not access.
Arguments ViewsOf(const Inputs& inputs) {
  Arguments arguments;
  arguments.inputs[Role::kQ] = inputs.query.View();
  arguments.inputs[Role::kK] = inputs.key.View();
  arguments.inputs[Role::kV] = inputs.value.View();
  if (inputs.mask) {
    arguments.inputs[Role::kMask] = inputs.mask->View();
    for (int axis = 0; axis < 4; ++axis) {
      if (arguments.inputs[Role::kMask].dims[axis] == 1) {
        arguments.inputs[Role::kMask].strides[axis] = 0;
      }
    }
  }
  if (inputs.bias) arguments.inputs[Role::kBias] = inputs.bias->View();
  if (inputs.bias_table) arguments.inputs[Role::kBiasTable] = inputs.bias_table->View();
  if (inputs.cos_cache) arguments.inputs[Role::kCosCache] = inputs.cos_cache->View();
  if (inputs.sin_cache) arguments.inputs[Role::kSinCache] = inputs.sin_cache->View();
  if (inputs.position_ids) arguments.inputs[Role::kPositionIds] = inputs.position_ids->View();
  if (inputs.past_key) arguments.inputs[Role::kPastKey] = inputs.past_key->View();
  if (inputs.past_value) arguments.inputs[Role::kPastValue] = inputs.past_value->View();
  arguments.key_lengths = inputs.key_lengths;
  return arguments;
}

absl::StatusOr<DiagnosisReport> TryDiagnose(const Problem& problem, const Inputs& inputs,
                                            const PlanOptions& options = {}, int workers = 1,
                                            const FieldNames& names = kOnnxNames) {
  ThreadPool pool(workers);
  return Diagnose(problem, ViewsOf(inputs), options, pool, names);
}

DiagnosisReport MustDiagnose(const Problem& problem, const Inputs& inputs,
                             const PlanOptions& options = {}, int workers = 1) {
  absl::StatusOr<DiagnosisReport> report = TryDiagnose(problem, inputs, options, workers);
  EXPECT_TRUE(report.ok()) << report.status();
  return report.ok() ? *std::move(report) : DiagnosisReport{};
}

Tensor MaskOf(DType dtype, const Dims& dims, const std::vector<double>& values) {
  Tensor mask(dtype, dims);
  size_t n = 0;
  for (int64_t b = 0; b < dims[0]; ++b) {
    for (int64_t h = 0; h < dims[1]; ++h) {
      for (int64_t i = 0; i < dims[2]; ++i) {
        for (int64_t j = 0; j < dims[3]; ++j) mask.Set(b, h, i, j, values.at(n++));
      }
    }
  }
  return mask;
}

void SetMask(Problem& problem, Inputs& inputs, const Tensor& mask) {
  problem.mask = MaskShape{mask.dtype(), mask.dims()};
  inputs.mask = mask;
}

std::vector<double> Finite(std::vector<double> values) {
  values.erase(
      std::remove_if(values.begin(), values.end(), [](double x) { return !std::isfinite(x); }),
      values.end());
  return values;
}

// Expects the bounds of the finite values.
void ExpectBounds(const std::string& name, const NumberSummary& got,
                  const std::vector<double>& values) {
  const std::vector<double> finite = Finite(values);
  ASSERT_EQ(got.finite, static_cast<int64_t>(finite.size())) << name;
  if (finite.empty()) return;
  EXPECT_NEAR(got.min, *std::min_element(finite.begin(), finite.end()), 1e-12) << name;
  EXPECT_NEAR(got.max, *std::max_element(finite.begin(), finite.end()), 1e-12) << name;
}

TEST(DiagnosisTest, FollowsTheHandComputedExampleStepByStep) {
  const Problem problem = Square(3);
  const double x[3][4] = {{1, 0, 1, 0}, {0, 1, 0, 1}, {1, 1, 0, 0}};
  Tensor tensor(DType::kFloat32, {1, 1, 3, 4});
  for (int64_t s = 0; s < 3; ++s) {
    for (int64_t e = 0; e < 4; ++e) tensor.Set(0, 0, s, e, x[s][e]);
  }
  const DiagnosisReport report = MustDiagnose(problem, {tensor, tensor, tensor});
  EXPECT_EQ(report.problem, "B=1 Hq=1 Hkv=1 Sq=3 Sk=3 P=0 D=4 Dv=4 FP32 scale=0.5");
  EXPECT_EQ(report.raw_scores.count(), 9);
  EXPECT_EQ(report.raw_scores.min, 0);
  EXPECT_EQ(report.raw_scores.max, 2);
  EXPECT_EQ(report.scaled_scores.max, 1);
  EXPECT_EQ(report.widest_row, 1);
  EXPECT_EQ(report.biased_scores.max, 1);
  EXPECT_NEAR(report.weights.min, 0.18632, 1e-5);
  EXPECT_NEAR(report.weights.max, 0.50648, 1e-5);
  EXPECT_EQ(report.row_sums.count(), 3);
  EXPECT_NEAR(report.row_sums.min, 1, 1e-12);
  EXPECT_NEAR(report.row_sums.max, 1, 1e-12);
  EXPECT_NEAR(report.output.min, 0.18632, 1e-5);
  EXPECT_NEAR(report.output.max, 0.81368, 1e-5);
  EXPECT_EQ(report.hidden_by_mask + report.hidden_by_position + report.empty_rows, 0);
  EXPECT_THAT(report.warnings, IsEmpty());
}

TEST(DiagnosisTest, CountsNonFiniteValuesOfEachInput) {
  const Problem problem = Square(3);
  Inputs inputs = SomeInputs(problem);
  inputs.key.Fill(1);
  inputs.query.Fill(1);
  inputs.query.Set(0, 0, 0, 0, -2);
  inputs.query.Set(0, 0, 1, 0, kNan);
  inputs.query.Set(0, 0, 1, 1, kNan);
  inputs.query.Set(0, 0, 2, 2, kInf);
  inputs.query.Set(0, 0, 2, 3, -kInf);
  const DiagnosisReport report = MustDiagnose(problem, inputs);
  ASSERT_EQ(report.inputs.size(), 3u);
  const TensorSummary& q = report.inputs[0];
  EXPECT_EQ(q.name, "Q");
  EXPECT_EQ(q.dims, (Dims{1, 1, 3, 4}));
  EXPECT_EQ(q.numbers.count(), 12);
  EXPECT_EQ(q.numbers.nan, 2);
  EXPECT_EQ(q.numbers.positive_inf, 1);
  EXPECT_EQ(q.numbers.negative_inf, 1);
  EXPECT_EQ(q.numbers.min, -2);
  EXPECT_EQ(q.numbers.max, 1);
  EXPECT_EQ(q.numbers.sum, 7 - 2);
  EXPECT_EQ(report.raw_scores.nan, 6) << "rows 1 and 2, the latter from inf - inf";
  EXPECT_THAT(report.warnings,
              Contains(HasSubstr("Q has 2 NaN among 12 values; each visible one propagates to "
                                 "the output; the first is at [0,0,1,")));
  EXPECT_THAT(report.warnings,
              Contains(HasSubstr("Q has 2 infinite values among 12; the first is at [0,0,2,2]")));
  EXPECT_THAT(report.warnings, Contains(HasSubstr("the output has ")));
}

TEST(DiagnosisTest, DistinguishesPositionFromMaskAndCountsAPairOnce) {
  Problem problem = Square(3);
  problem.causal = true;
  Inputs inputs = SomeInputs(problem);
  // Hides (0, 2), which causality hides too, and (2, 0).
  SetMask(problem, inputs, MaskOf(DType::kBool, {1, 1, 3, 3}, {1, 1, 0, 1, 1, 1, 0, 1, 1}));
  const DiagnosisReport report = MustDiagnose(problem, inputs);
  EXPECT_EQ(report.hidden_by_position, 3);
  EXPECT_EQ(report.hidden_by_mask, 1);
  EXPECT_EQ(report.biased_scores.negative_inf, 4);
  EXPECT_EQ(report.biased_scores.finite, 5);
  EXPECT_EQ(report.empty_rows, 0);
}

TEST(DiagnosisTest, CountsTheKeysOfAMaskWithoutColumnsAsMasked) {
  Problem problem = Square(4);
  Inputs inputs = SomeInputs(problem);
  SetMask(problem, inputs, MaskOf(DType::kBool, {1, 1, 4, 0}, {}));
  const DiagnosisReport report = MustDiagnose(problem, inputs);
  EXPECT_EQ(report.hidden_by_mask, 4 * 4);
  EXPECT_EQ(report.hidden_by_position, 0);
  EXPECT_EQ(report.empty_rows, 4);
}

TEST(DiagnosisTest, CountsMinusInfinityAndTheKeysBeyondAShortMaskAsMasked) {
  Problem problem = Square(4);
  Inputs inputs = SomeInputs(problem);
  SetMask(problem, inputs, MaskOf(DType::kFloat32, {1, 1, 1, 3}, {0.5, -kInf, 0}));
  const DiagnosisReport report = MustDiagnose(problem, inputs);
  EXPECT_EQ(report.hidden_by_mask, 4 * 2);
  ASSERT_EQ(report.inputs.size(), 4u);
  EXPECT_EQ(report.inputs[3].name, "attn_mask");
  EXPECT_EQ(report.inputs[3].dims, (Dims{1, 1, 1, 3}));
  EXPECT_EQ(report.inputs[3].numbers.negative_inf, 1);
  EXPECT_THAT(report.warnings, Not(Contains(HasSubstr("attn_mask"))));
}

TEST(DiagnosisTest, ListsTheFirstEmptyRows) {
  Problem problem = Square(6);
  problem.batch = 2;
  problem.query_heads = problem.kv_heads = 2;
  Inputs inputs = SomeInputs(problem);
  // Queries 1, 3 and 5 of every batch row and head.
  SetMask(problem, inputs, MaskOf(DType::kBool, {1, 1, 6, 1}, {1, 0, 1, 0, 1, 0}));
  for (const int workers : {1, 4}) {
    const DiagnosisReport report = MustDiagnose(problem, inputs, {}, workers);
    EXPECT_EQ(report.empty_rows, 12);
    using Place = std::array<int64_t, 3>;
    EXPECT_THAT(report.first_empty_rows,
                ElementsAre(Place{0, 0, 1}, Place{0, 0, 3}, Place{0, 0, 5}, Place{0, 1, 1},
                            Place{0, 1, 3}, Place{0, 1, 5}, Place{1, 0, 1}, Place{1, 0, 3}))
        << "with " << workers << " workers";
    EXPECT_EQ(report.row_sums.count(), 24 - 12) << "rows that see nothing have no sum";
    EXPECT_THAT(report.warnings, Contains(HasSubstr("query rows that see no key: 12")));
  }
}

TEST(DiagnosisTest, WarnsAboutAFloatMaskOfZerosAndOnesOnly) {
  const struct {
    const char* name;
    DType dtype;
    std::vector<double> values;
    bool warns;
  } cases[] = {
      {"fp32", DType::kFloat32, {0, 1, 1, 0}, true},
      {"all ones", DType::kBFloat16, {1, 1, 1, 1}, true},
      {"a valid mask that hides nothing", DType::kFloat32, {0, 0, 0, 0}, false},
      {"a bias", DType::kFloat32, {0, 1, 0.5, 0}, false},
      {"bool", DType::kBool, {0, 1, 1, 0}, false},
  };
  for (const auto& c : cases) {
    Problem problem = Square(4);
    Inputs inputs = SomeInputs(problem);
    SetMask(problem, inputs, MaskOf(c.dtype, {1, 1, 1, 4}, c.values));
    const DiagnosisReport report = MustDiagnose(problem, inputs);
    const auto warning = Contains(HasSubstr("contains only 0 and 1"));
    if (c.warns) {
      EXPECT_THAT(report.warnings, warning) << c.name;
    } else {
      EXPECT_THAT(report.warnings, Not(warning)) << c.name;
    }
  }
}

TEST(DiagnosisTest, WarnsAboutPlusInfinityInAMask) {
  Problem problem = Square(2);
  Inputs inputs = SomeInputs(problem);
  SetMask(problem, inputs, MaskOf(DType::kFloat32, {1, 1, 1, 2}, {kInf, 0}));
  const DiagnosisReport report = MustDiagnose(problem, inputs);
  EXPECT_THAT(report.warnings, Contains(HasSubstr("attn_mask has 1 values of +inf among 2")));
  EXPECT_EQ(report.weights.nan, 4);
}

TEST(DiagnosisTest, WarnsAboutAConstantTensor) {
  const Problem problem = Square(3);
  Inputs inputs = SomeInputs(problem);
  inputs.key.Fill(0);
  EXPECT_THAT(MustDiagnose(problem, inputs).warnings, Contains("all values of K are 0"));
  inputs.key.Set(0, 0, 0, 0, kNan);
  EXPECT_THAT(MustDiagnose(problem, inputs).warnings, Not(Contains(HasSubstr("all values of"))));
}

TEST(DiagnosisTest, WarnsAboutScoresFarApartWithinARowOnly) {
  const Problem problem = Square(2, 1);
  Inputs inputs = SomeInputs(problem);
  inputs.key.Fill(1);
  inputs.query.Set(0, 0, 0, 0, -100);
  inputs.query.Set(0, 0, 1, 0, 100);
  const auto warning = Contains(HasSubstr("the scaled scores of a row span up to"));
  EXPECT_THAT(MustDiagnose(problem, inputs).warnings, Not(warning));
  inputs.key.Set(0, 0, 0, 0, 0);
  const DiagnosisReport report = MustDiagnose(problem, inputs);
  EXPECT_EQ(report.widest_row, 100);
  EXPECT_THAT(report.warnings, warning);
}

TEST(DiagnosisTest, CountsTheBiasOfTheDistanceInTheBiasedScores) {
  Problem problem = Square(3);
  Inputs inputs = SomeInputs(problem);
  inputs.key.Fill(0);
  inputs.key.Set(0, 0, 0, 0, 1e-9);  // not constant
  problem.alibi = true;              // one head: a slope of 2^-8
  const DiagnosisReport report = MustDiagnose(problem, inputs);
  EXPECT_THAT(report.problem, HasSubstr(" alibi"));
  EXPECT_NEAR(report.scaled_scores.min, 0, 1e-6);
  EXPECT_NEAR(report.biased_scores.min, -2 * 0x1p-8, 1e-6);
}

TEST(DiagnosisTest, WarnsAboutTheScaleOfABiasTable) {
  Problem problem = Square(3);
  problem.bias_table = BiasTable{DType::kFloat32, 4};
  Inputs inputs = SomeInputs(problem);
  inputs.bias_table = Tensor(DType::kFloat32, {4, 1, 1, 1});
  const auto warning = Contains(HasSubstr("with a bias_table"));
  const DiagnosisReport report = MustDiagnose(problem, inputs);
  EXPECT_THAT(report.warnings, warning);
  EXPECT_THAT(report.problem, HasSubstr(" bias_table=FP32[4,1]"));
  problem.scale = 1;
  EXPECT_THAT(MustDiagnose(problem, inputs).warnings, Not(warning));
}

TEST(DiagnosisTest, AHiddenNaNDoesNotReachTheOutput) {
  Problem problem = Square(3);
  problem.causal = true;
  Inputs inputs = SomeInputs(problem);
  SetMask(problem, inputs, MaskOf(DType::kBool, {1, 1, 1, 3}, {1, 1, 0}));
  inputs.value.Set(0, 0, 2, 1, kNan);
  inputs.key.Set(0, 0, 2, 1, kNan);
  const DiagnosisReport report = MustDiagnose(problem, inputs);
  EXPECT_EQ(report.raw_scores.nan, 3);
  EXPECT_EQ(report.biased_scores.nan, 0);
  EXPECT_EQ(report.output.nan, 0);
  EXPECT_THAT(report.warnings, Contains(HasSubstr("V has 1 NaN among 12 values")));
}

TEST(DiagnosisTest, AgreesWithTheOracleOnGroupsPastLengthsAndWindows) {
  Problem problem = {.dtype = DType::kFloat16,
                     .batch = 2,
                     .query_heads = 6,
                     .kv_heads = 2,
                     .query_length = 5,
                     .key_length = 7,
                     .past_length = 3,
                     .head_size = 8,
                     .value_head_size = 3,
                     .softcap = 2,
                     .causal = true,
                     .left_window = 4,
                     .mask = MaskShape{DType::kFloat32, {2, 1, 5, 10}},
                     .bias = MaskShape{DType::kFloat32, {2, 6, 5, 10}},
                     .has_key_lengths = true,
                     .score_output = ScoreOutput::kBiased};
  const Inputs inputs = SomeInputs(problem);
  const DiagnosisReport report = MustDiagnose(problem, inputs, {}, 3);
  const Expected biased = Attend(problem, inputs);
  problem.score_output = ScoreOutput::kSoftcapped;
  const Expected softcapped = Attend(problem, inputs);
  problem.score_output = ScoreOutput::kWeights;
  const Expected weighed = Attend(problem, inputs);
  ExpectBounds("scaled scores", report.scaled_scores, softcapped.scores);
  ExpectBounds("biased scores", report.biased_scores, biased.scores);
  ExpectBounds("weights", report.weights, weighed.scores);
  ExpectBounds("output", report.output, weighed.output);

  int64_t hidden = 0;
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < 5; ++i) {
      for (int64_t j = 0; j < 10; ++j) hidden += !IsVisible(problem, inputs.key_lengths, b, i, j);
    }
  }
  EXPECT_EQ(report.hidden_by_position, 6 * hidden);
  EXPECT_EQ(report.raw_scores.count(), 2 * 6 * 5 * 10);
  std::vector<std::string> names;
  for (const TensorSummary& input : report.inputs) names.push_back(input.name);
  EXPECT_THAT(names,
              ElementsAre("Q", "K", "V", "attn_mask", "past_key", "past_value", "attention_bias"));
  ExpectBounds("past_value", report.inputs[5].numbers, inputs.past_value->ToVector());
  EXPECT_EQ(report.problem,
            "B=2 Hq=6 Hkv=2 Sq=5 Sk=7 P=3 D=8 Dv=3 FP16 scale=0.353553 causal "
            "left_window=4 softcap=2 mask=FP32[2,1,5,10] key_lengths=INT64[2] "
            "attention_bias=FP32[2,6,5,10]");
}

TEST(DiagnosisTest, WeightsAndRowSumsAreThoseBeforeDropout) {
  Problem problem = Square(16);
  problem.dropout = Dropout{.probability = 0.5, .seed = 3};
  const DiagnosisReport report = MustDiagnose(problem, SomeInputs(problem));
  EXPECT_GT(report.weights.min, 0);
  EXPECT_NEAR(report.row_sums.min, 1, 1e-12);
  EXPECT_NEAR(report.row_sums.max, 1, 1e-12);
  EXPECT_THAT(report.problem, HasSubstr("dropout=0.5"));
}

TEST(DiagnosisTest, AcceptsEmptyProblems) {
  Problem problem = Square(3);
  problem.key_length = 0;
  DiagnosisReport report = MustDiagnose(problem, SomeInputs(problem));
  EXPECT_EQ(report.raw_scores.count(), 0);
  EXPECT_EQ(report.empty_rows, 3);
  EXPECT_EQ(report.output.max, 0);

  problem = Square(3);
  problem.batch = 0;
  report = MustDiagnose(problem, SomeInputs(problem));
  EXPECT_EQ(report.output.count(), 0);
  EXPECT_EQ(report.empty_rows, 0);
  EXPECT_THAT(report.warnings, IsEmpty());
}

const BackendChoice& ChoiceOf(const std::vector<BackendChoice>& choices, const std::string& name) {
  return *std::find_if(choices.begin(), choices.end(),
                       [&](const BackendChoice& choice) { return choice.backend == name; });
}

TEST(DiagnosisTest, ReportsTheChosenBackendAndWhyOthersAreNot) {
  const Problem problem = Square(3);
  const cudnn::CudnnBackend without_device;
  const BackendSet backends({&without_device});
  const std::vector<BackendChoice> by_auto =
      MustDiagnose(problem, SomeInputs(problem), {.threads = 2, .backends = &backends}).backends;
  ASSERT_EQ(by_auto.size(), backends.size());
  EXPECT_TRUE(ChoiceOf(by_auto, "cpu").chosen);
  EXPECT_EQ(ChoiceOf(by_auto, "cpu").reason, "");
  EXPECT_FALSE(ChoiceOf(by_auto, "cudnn").chosen);
  EXPECT_THAT(ChoiceOf(by_auto, "cudnn").reason, HasSubstr("no device has been opened"));
  EXPECT_EQ(by_auto.back().backend, "reference");
  EXPECT_FALSE(by_auto.back().chosen);
  EXPECT_EQ(by_auto.back().plan, "reference");
  EXPECT_EQ(by_auto.back().workspace_bytes, 2 * (3 + 4) * 8);
  EXPECT_THAT(by_auto.back().reason, HasSubstr("auto prefers " + ChoiceOf(by_auto, "cpu").plan));

  const std::vector<BackendChoice> by_name =
      MustDiagnose(problem, SomeInputs(problem), {.backend = "reference"}).backends;
  EXPECT_FALSE(ChoiceOf(by_name, "cpu").chosen);
  EXPECT_EQ(ChoiceOf(by_name, "cpu").reason, "the backend is set to reference");
  EXPECT_TRUE(by_name.back().chosen);
}

TEST(DiagnosisTest, UsesTheNamesOfTheInterface) {
  FieldNames names = kOnnxNames;
  names.tensors[Role::kQ] = "query";
  names.tensors[Role::kMask] = "bias";
  Problem problem = Square(2);
  Inputs inputs = SomeInputs(problem);
  inputs.query.Fill(kInf);
  SetMask(problem, inputs, MaskOf(DType::kFloat32, {1, 1, 1, 2}, {0, 1}));
  const absl::StatusOr<DiagnosisReport> report = TryDiagnose(problem, inputs, {}, 1, names);
  ASSERT_TRUE(report.ok()) << report.status();
  EXPECT_EQ(report->inputs[0].name, "query");
  EXPECT_EQ(report->inputs[3].name, "bias");
  EXPECT_THAT(report->warnings, Contains(HasSubstr("query has 8 infinite values")));
  EXPECT_THAT(report->warnings,
              Contains(HasSubstr("bias has type FP32 and contains only 0 and 1")));
}

TEST(DiagnosisTest, ReportsTheScoresOfRotatedRows) {
  const Problem plain{.batch = 2,
                      .query_heads = 2,
                      .kv_heads = 1,
                      .query_length = 3,
                      .key_length = 4,
                      .head_size = 6,
                      .value_head_size = 6};
  Problem problem = plain;
  problem.has_position_ids = true;
  problem.rotary_cache = RotaryCache{.rows = 9, .pairs = 3};
  const Inputs inputs = SomeInputs(problem);
  Inputs rotated = inputs;
  rotated.query = RotatedQueries(problem, inputs);
  rotated.key = RotatedKeys(problem, inputs);
  const DiagnosisReport got = MustDiagnose(problem, inputs);
  const DiagnosisReport want = MustDiagnose(plain, rotated);
  EXPECT_NEAR(got.raw_scores.max, want.raw_scores.max, 1e-6);
  EXPECT_NEAR(got.raw_scores.min, want.raw_scores.min, 1e-6);
  EXPECT_THAT(got.problem,
              HasSubstr("cos_cache=FP32[9,3] sin_cache=FP32[9,3] position_ids=INT64[2,3]"));
  problem.rotary_cache = RotaryCache{.batch = 2, .rows = 3, .pairs = 3};
  EXPECT_THAT(Describe(problem), HasSubstr("cos_cache=FP32[2,3,3] sin_cache=FP32[2,3,3]"));
}

TEST(DiagnosisTest, RejectsWhatRunRejects) {
  Problem problem = Square(3);
  problem.has_key_lengths = true;
  Inputs inputs = SomeInputs(problem);
  inputs.key_lengths = {4};
  absl::Status status = TryDiagnose(problem, inputs).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("nonpad_kv_seqlen[0] is 4"));

  problem = Square(3);
  problem.softcap = -1;
  status = TryDiagnose(problem, SomeInputs(Square(3))).status();
  EXPECT_THAT(std::string(status.message()), HasSubstr("softcap is -1"));
  status = TryDiagnose(Square(3), SomeInputs(Square(3)), {.backend = "abacus"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

TEST(NumberSummaryTest, MergesInAnyOrder) {
  const std::vector<double> values = {3, kNan, -1, kInf, 2, -kInf, kNan};
  NumberSummary all;
  for (double value : values) all.Add(value);
  for (size_t split = 0; split <= values.size(); ++split) {
    NumberSummary first, second;
    for (size_t n = 0; n < values.size(); ++n) (n < split ? first : second).Add(values[n]);
    for (const auto& [a, b] : {std::pair(first, second), std::pair(second, first)}) {
      NumberSummary merged = a;
      merged.Merge(b);
      EXPECT_EQ(merged.finite, all.finite) << "split at " << split;
      EXPECT_EQ(merged.nan, 2) << "split at " << split;
      EXPECT_EQ(merged.positive_inf, 1) << "split at " << split;
      EXPECT_EQ(merged.negative_inf, 1) << "split at " << split;
      EXPECT_EQ(merged.min, -1) << "split at " << split;
      EXPECT_EQ(merged.max, 3) << "split at " << split;
      EXPECT_EQ(merged.sum, 4) << "split at " << split;
    }
  }
}

// The report of a backward pass with dY.
DiagnosisReport DiagnoseFlow(Problem problem, const Inputs& inputs, const Tensor& output_gradient,
                             int workers = 2) {
  problem.backward = Backward{};
  problem.backward->gradients.Add(Role::kDQ);
  Arguments arguments = ViewsOf(inputs);
  arguments.inputs[Role::kOutputGradient] = output_gradient.View();
  ThreadPool pool(workers);
  return Diagnose(problem, arguments, {}, pool).value();
}

Tensor SomeOutputGradient(const Problem& p) {
  Rng rng(8);
  return Tensor(p.dtype, {p.batch, p.query_heads, p.query_length, p.value_head_size})
      .FillUniform(rng, -1, 1);
}

TEST(DiagnosisTest, TheGradientFlowsToEveryPosition) {
  Problem p = Square(6);
  p.batch = 2;
  p.past_length = 3;
  p.rope_theta = 100;
  const DiagnosisReport report = DiagnoseFlow(p, SomeInputs(p), SomeOutputGradient(p));
  ASSERT_EQ(report.gradients.size(), 3u);
  const int64_t positions[] = {6, 9, 9};
  for (size_t n = 0; n < 3; ++n) {
    const GradientSummary& gradient = report.gradients[n];
    EXPECT_EQ(gradient.role, static_cast<Role>(static_cast<size_t>(Role::kDQ) + n));
    ASSERT_EQ(gradient.position_norms.size(), static_cast<size_t>(positions[n]));
    EXPECT_EQ(gradient.numbers.finite, 2 * positions[n] * 4);
    double squares = 0;
    for (const double norm : gradient.position_norms) {
      EXPECT_GT(norm, 0);
      squares += norm * norm;
    }
    EXPECT_NEAR(gradient.norm, std::sqrt(squares), 1e-12);
  }
  EXPECT_THAT(report.warnings, IsEmpty());
}

TEST(DiagnosisTest, WithoutOutputGradientThereIsNoFlow) {
  const Problem p = Square(3);
  EXPECT_THAT(MustDiagnose(p, SomeInputs(p)).gradients, IsEmpty());
}

TEST(DiagnosisTest, PeakedWeightsLetTheGradientVanish) {
  Problem p = Square(4);
  p.scale = 1000;
  Inputs inputs = SomeInputs(p);
  const DiagnosisReport report = DiagnoseFlow(p, inputs, SomeOutputGradient(p));
  EXPECT_THAT(report.warnings, Contains(HasSubstr("the gradient vanishes")));
  EXPECT_THAT(report.warnings, Contains(HasSubstr("reduce the scale")));
}

TEST(DiagnosisTest, HiddenKeysReceiveNoGradient) {
  Problem p = Square(4);
  p.mask = MaskShape{DType::kBool, {1, 1, 1, 4}};
  Inputs inputs = SomeInputs(p);
  inputs.mask->Fill(1);
  inputs.mask->Set(0, 0, 0, 2, 0);
  const DiagnosisReport report = DiagnoseFlow(p, inputs, SomeOutputGradient(p));
  EXPECT_THAT(report.warnings, Contains(HasSubstr("dK is 0 at 1 of 4 key positions: 2")));
  EXPECT_THAT(report.warnings, Contains(HasSubstr("dV is 0 at 1 of 4 key positions: 2")));
}

TEST(DiagnosisTest, AQueryThatSeesOneKeyNeedsNoGradient) {
  Problem p = Square(4);
  p.causal = true;
  const DiagnosisReport report = DiagnoseFlow(p, SomeInputs(p), SomeOutputGradient(p));
  EXPECT_EQ(report.gradients[0].position_norms[0], 0);
  EXPECT_THAT(report.warnings, IsEmpty());
}

TEST(DiagnosisTest, RowsWithoutKeysAreZeroHereAndNanElsewhere) {
  Problem p = Square(4);
  p.has_key_lengths = true;
  Inputs inputs = SomeInputs(p);
  inputs.key_lengths = {0};
  const DiagnosisReport report = DiagnoseFlow(p, inputs, SomeOutputGradient(p));
  EXPECT_EQ(report.gradients[0].norm, 0);
  EXPECT_THAT(report.warnings, Contains(HasSubstr("rows that see no key: 4; their gradient is")));
}

TEST(DiagnosisTest, NamesTheRowsThatTheRuleOfOnnxMoves) {
  Problem p = Square(5);
  p.batch = 4;
  p.causal = p.has_key_lengths = true;
  Inputs inputs = SomeInputs(p);
  inputs.key_lengths = {5, 3, 5, 2};
  const std::string moved =
      "the queries of batch rows 1, 3 by nonpad_kv_seqlen - Sq, those of row 1 by -2";
  EXPECT_THAT(MustDiagnose(p, inputs).warnings, ElementsAre(HasSubstr("would move " + moved)));
  p.alignment = Alignment::kOnnx;
  const DiagnosisReport report = MustDiagnose(p, inputs);
  EXPECT_THAT(report.problem, HasSubstr("onnx_alignment"));
  EXPECT_THAT(report.warnings, Contains(HasSubstr("the alignment of ONNX moves " + moved)));

  const auto expect_nothing = [](const Problem& problem, const Inputs& inputs) {
    EXPECT_THAT(MustDiagnose(problem, inputs).warnings, Not(Contains(HasSubstr("ONNX"))));
  };
  Problem other = p;
  other.causal = false;
  expect_nothing(other, inputs);
  other = p;
  other.alignment = Alignment::kBottomRight;
  expect_nothing(other, inputs);
  inputs.key_lengths = {5, 5, 5, 5};
  expect_nothing(p, inputs);
  p.past_length = 3;
  inputs = SomeInputs(p);
  inputs.key_lengths = {5, 3, 5, 2};
  expect_nothing(p, inputs);
}

TEST(DiagnosisTest, AnOutlierExplodes) {
  const Problem p = Square(5);
  Tensor output_gradient = SomeOutputGradient(p);
  for (int64_t d = 0; d < 4; ++d) output_gradient.Set(0, 0, 3, d, 1e5 * (d + 1));
  const DiagnosisReport report = DiagnoseFlow(p, SomeInputs(p), output_gradient);
  EXPECT_THAT(report.warnings, Contains(HasSubstr("the norm of dQ at query position 3 is")));
}

TEST(DiagnosisTest, NanInTheGradientIsNamed) {
  const Problem p = Square(3);
  Inputs inputs = SomeInputs(p);
  inputs.value.Set(0, 0, 1, 1, kNan);
  const DiagnosisReport report = DiagnoseFlow(p, inputs, SomeOutputGradient(p));
  EXPECT_THAT(report.warnings, Contains(HasSubstr("dQ has ")));
  EXPECT_GT(report.gradients[0].numbers.nan, 0);
}

}  // namespace
}  // namespace rapt::test
