// What Diagnose says about FAVOR+ and LSH, against what these compute.
#include "attention/estimate_fit.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "attention/diagnosis.h"
#include "attention/mechanism/linear/linear_attention.h"
#include "base/thread_pool.h"
#include "tests/support/oracle.h"
#include "tests/support/run_attention.h"
#include "tests/support/run_operator.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::StartsWith;

Problem Square(int64_t length) {
  return {.batch = 1,
          .query_heads = 1,
          .kv_heads = 1,
          .query_length = length,
          .key_length = length,
          .head_size = 16,
          .value_head_size = 16,
          .scale = 0.25};
}

// Queries and keys with numbers from -size to size.
Inputs InputsOf(const Problem& problem, double size) {
  Rng rng(3);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.query.FillUniform(rng, -size, size);
  inputs.key.FillUniform(rng, -size, size);
  return inputs;
}

DiagnosisReport MustDiagnose(const Problem& problem, const Inputs& inputs) {
  Arguments arguments;
  arguments.inputs[Role::kQ] = inputs.query.View();
  arguments.inputs[Role::kK] = inputs.key.View();
  arguments.inputs[Role::kV] = inputs.value.View();
  if (inputs.mask) arguments.inputs[Role::kMask] = inputs.mask->View();
  ThreadPool pool(2);
  const absl::StatusOr<DiagnosisReport> report = Diagnose(problem, arguments, {}, pool);
  EXPECT_TRUE(report.ok()) << report.status();
  return *report;
}

// The relative error of FAVOR+ with kFavorFeatures, as the operator measures it.
double ErrorOfFavor(const Problem& problem, const Inputs& inputs) {
  LinearAttentionCall call;
  Arguments arguments;
  for (const auto& [role, tensor] :
       {std::pair(Role::kQ, &inputs.query), {Role::kK, &inputs.key}, {Role::kV, &inputs.value}}) {
    call.inputs[role] = TensorSpec{DType::kFloat32, {1, problem.key_length, problem.head_size}};
    arguments.inputs[role] = tensor->View();
  }
  call.q_num_heads = call.kv_num_heads = 1;
  call.update_rule = UpdateRule::kLinear;
  call.feature_map = FeatureMap::kFavor;
  call.is_causal = problem.causal;
  call.scale = *problem.scale;
  call.num_features = kFavorFeatures;
  call.seed = 1;
  call.error_rows = problem.query_length;
  Tensor y(DType::kFloat32, {1, 1, problem.query_length, problem.value_head_size});
  Tensor error(DType::kFloat32, {1, 1, 1, 1});
  arguments.outputs[Role::kY] = y.MutableView();
  arguments.outputs[linear::kRelativeError] = error.MutableView();
  RunOperator(*MakeLinearAttention(call).value(), arguments, {});
  return error.At(0, 0, 0, 0);
}

TEST(EstimateFitTest, FavorServesSmallNormsAndNotLargeOnes) {
  for (const bool causal : {false, true}) {
    Problem problem = Square(64);
    problem.causal = causal;
    const Inputs small = InputsOf(problem, 0.5);
    DiagnosisReport report = MustDiagnose(problem, small);
    EXPECT_THAT(report.estimates[0],
                StartsWith("FAVOR+ may estimate this call: scale * |q + k|^2"));
    EXPECT_LT(ErrorOfFavor(problem, small), 0.3);
    const Inputs large = InputsOf(problem, 3);
    report = MustDiagnose(problem, large);
    EXPECT_THAT(report.estimates[0], StartsWith("FAVOR+ is useless for these inputs: scale *"));
    EXPECT_GT(ErrorOfFavor(problem, large), 0.7);
  }
}

// The figures, computed from the weights of the oracle.
TEST(EstimateFitTest, FiguresAreMeansOverRows) {
  Problem problem = Square(700);
  problem.causal = true;
  problem.scale = 1;
  problem.score_output = ScoreOutput::kWeights;
  const Inputs inputs = InputsOf(problem, 1);
  const Expected exact = Attend(problem, inputs);
  problem.score_output.reset();
  const DiagnosisReport report = MustDiagnose(problem, inputs);
  EXPECT_EQ(report.estimate_fit.rows, 64);
  double norms = 0, reach = 0;
  for (int64_t i = 0; i < 700; i += 11) {
    std::vector<double> weights;
    for (int64_t j = 0; j < 700; ++j) {
      weights.push_back(exact.scores[i * 700 + j]);
      double norm = 0;
      for (int64_t d = 0; d < 16; ++d) {
        norm += std::pow(inputs.query.At(0, 0, i, d) + inputs.key.At(0, 0, j, d), 2);
      }
      norms += weights.back() * norm / 64;
    }
    std::sort(weights.begin(), weights.end(), std::greater<>());
    for (int64_t n = 0; n < kLshKeys; ++n) reach += weights[n] / 64;
  }
  EXPECT_NEAR(report.estimate_fit.squared_norms / 64, norms, 1e-4 * norms);
  EXPECT_NEAR(report.estimate_fit.reachable_weights / 64, reach, 1e-4);
}

TEST(EstimateFitTest, LshServesFewLargeWeightsAndNotManyEqualOnes) {
  Problem problem = Square(2048);
  problem.query_length = 4;
  Inputs inputs = InputsOf(problem, 1);
  EXPECT_THAT(MustDiagnose(problem, inputs).estimates[1],
              HasSubstr("LSH is useless for these inputs: 4 rounds with chunks of 64 meet at most "
                        "512 of the 2048 keys"));
  problem.scale = 20;
  EXPECT_THAT(MustDiagnose(problem, inputs).estimates[1],
              HasSubstr("LSH may estimate this call, if its queries are its keys"));
  problem = Square(512);
  EXPECT_THAT(MustDiagnose(problem, InputsOf(problem, 1)).estimates[1],
              StartsWith("LSH saves nothing: 4 rounds with chunks of 64 meet 512 keys"));
}

TEST(EstimateFitTest, RowsOfNanHaveNoEstimates) {
  const Problem problem = Square(600);
  Inputs inputs = InputsOf(problem, 0.5);
  for (int64_t i = 1; i < 600; ++i) inputs.query.Set(0, 0, i, 3, std::nan(""));
  DiagnosisReport report = MustDiagnose(problem, inputs);
  EXPECT_EQ(report.estimate_fit.rows, 1) << "row 0";
  EXPECT_THAT(report.estimates[0], StartsWith("FAVOR+ may estimate this call"));
  inputs.key.Set(0, 0, 5, 3, std::nan(""));
  report = MustDiagnose(problem, inputs);
  EXPECT_EQ(report.estimate_fit.rows, 0);
  EXPECT_THAT(report.estimates, IsEmpty());
}

TEST(EstimateFitTest, OtherCallsHaveNoEstimates) {
  const std::function<void(Problem&)> kChanges[] = {
      [](Problem& p) {
        p.mask = MaskShape{DType::kBool, {1, 1, 1, 8}};
      },
      [](Problem& p) { p.left_window = 2; },
      [](Problem& p) { p.softcap = 3; },
      [](Problem& p) { p.scale = -1; },
      [](Problem& p) { p.dropout = Dropout{.probability = 0.5, .seed = 1}; },
      [](Problem& p) { p.normalizer = Normalizer::kSparsemax; },
      [](Problem& p) { p.query_length = 0; },
      [](Problem& p) { p.key_length = 0; },
  };
  for (const auto& change : kChanges) {
    Problem problem = Square(8);
    change(problem);
    const DiagnosisReport report = MustDiagnose(problem, InputsOf(problem, 1));
    EXPECT_THAT(report.estimates, IsEmpty());
    EXPECT_EQ(report.estimate_fit.rows, 0);
  }
}

}  // namespace
}  // namespace rapt::test
