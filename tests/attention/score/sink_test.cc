// head_sink on every backend and instruction set, in every type.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "attention/mechanism/softmax/softmax_state.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

using ::testing::Each;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr uint64_t kSeed = 20241122;

struct SinkCase {
  DType dtype;
  int64_t query_length;
  int64_t key_length;
  int threads;
};

std::vector<SinkCase> Cases() {
  std::vector<SinkCase> cases;
  for (DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    cases.push_back({dtype, 17, 65, 1});
    cases.push_back({dtype, 1, 65, 1});
    cases.push_back({dtype, 1, 4100, 16});  // split keys
  }
  return cases;
}

class SinkTest : public ::testing::TestWithParam<SinkCase> {
 protected:
  Problem Make() const {
    const SinkCase& c = GetParam();
    return {.dtype = c.dtype,
            .batch = 1,
            .query_heads = 2,
            .kv_heads = 1,
            .query_length = c.query_length,
            .key_length = c.key_length,
            .head_size = 24,
            .value_head_size = 17,
            .wants_lse = true};
  }

  static void SetSink(double sink, Problem& problem, Inputs& inputs) {
    problem.head_sink = DType::kFloat32;
    inputs.head_sink = Tensor(DType::kFloat32, {problem.query_heads, 1, 1, 1});
    inputs.head_sink->Fill(sink);
  }

  Outputs Run(const Target& target, const Problem& problem, const Inputs& inputs) const {
    return RunAttention(
               problem, inputs,
               {.backend = target.backend, .isa = target.isa, .threads = GetParam().threads})
        .value();
  }

  // Twice the type's tolerance, because sums may be in a different order.
  Tolerance TwoSided() const { return {2 * ToleranceOf(GetParam().dtype), {}}; }
};

TEST_P(SinkTest, MinusInfinityChangesNoBit) {
  Rng rng(kSeed);
  Problem problem = Make();
  problem.causal = true;  // rows without a key, if there are more queries than keys
  problem.alignment = Alignment::kBottomRight;
  if (GetParam().query_length > 1) problem.score_output = ScoreOutput::kWeights;
  Inputs inputs = RandomInputs(problem, rng);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs without = Run(target, problem, inputs);
    Problem with_sink = problem;
    Inputs sunk = inputs;
    SetSink(-kInf, with_sink, sunk);
    const Outputs with = Run(target, with_sink, sunk);
    EXPECT_EQ(with.output.ToVector(), without.output.ToVector());
    EXPECT_EQ(with.lse->ToVector(), without.lse->ToVector());
    if (with.scores) {
      EXPECT_EQ(with.scores->ToVector(), without.scores->ToVector());
    }
  }
}

TEST_P(SinkTest, TheLseOfARowWithoutKeysIsItsInfiniteSink) {
  Rng rng(kSeed);
  Problem problem = Make();
  problem.mask = MaskShape{DType::kBool, {1, 1, 1, problem.key_length}};
  Inputs inputs = RandomInputs(problem, rng);
  for (int64_t j = 0; j < problem.key_length; ++j) inputs.mask->Set(0, 0, 0, j, 0);
  SetSink(kInf, problem, inputs);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = Run(target, problem, inputs);
    EXPECT_THAT(got.output.ToVector(), Each(0));
    EXPECT_THAT(got.lse->ToVector(), Each(kInf));
  }
}

TEST_P(SinkTest, ZeroEqualsOneMoreKeyOfZeros) {
  Rng rng(kSeed);
  Problem problem = Make();
  problem.key_length += 1;
  Inputs with_key = RandomInputs(problem, rng);
  Problem shorter = Make();
  Inputs with_sink = with_key;
  with_sink.key = Tensor(problem.dtype, {1, 1, shorter.key_length, problem.head_size});
  with_sink.value = Tensor(problem.dtype, {1, 1, shorter.key_length, problem.value_head_size});
  const auto copy_rows = [&](Tensor& whole, Tensor& part) {
    for (int64_t e = 0; e < whole.dims()[3]; ++e) {
      for (int64_t j = 0; j < shorter.key_length; ++j) part.Set(0, 0, j, e, whole.At(0, 0, j, e));
      whole.Set(0, 0, shorter.key_length, e, 0);
    }
  };
  copy_rows(with_key.key, with_sink.key);
  copy_rows(with_key.value, with_sink.value);
  SetSink(0, shorter, with_sink);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs expected = Run(target, problem, with_key);
    const Outputs got = Run(target, shorter, with_sink);
    EXPECT_TRUE(AllClose("output", got.output, expected.output.ToVector(), TwoSided()));
    EXPECT_TRUE(AllClose("lse", *got.lse, expected.lse->ToVector(), TwoSided()));
  }
}

TEST_P(SinkTest, WithoutVisibleKeysTheOutputIsZeroAndLseTheSink) {
  Rng rng(kSeed);
  Problem problem = Make();
  problem.has_key_lengths = true;
  Inputs inputs = RandomInputs(problem, rng);
  inputs.value.Fill(std::numeric_limits<double>::quiet_NaN());
  inputs.key_lengths = {0};
  SetSink(-1.5, problem, inputs);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = Run(target, problem, inputs);
    EXPECT_THAT(got.output.ToVector(), ::testing::Each(0));
    EXPECT_THAT(got.lse->ToVector(), ::testing::Each(-1.5));
  }
}

TEST_P(SinkTest, WeightsSumToOneLessItsShare) {
  Rng rng(kSeed);
  Problem problem = Make();
  problem.score_output = ScoreOutput::kWeights;
  Inputs inputs = RandomInputs(problem, rng);
  SetSink(1, problem, inputs);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = Run(target, problem, inputs);
    for (int64_t i = 0; i < problem.query_length; ++i) {
      double sum = 0;
      for (int64_t j = 0; j < problem.key_length; ++j) sum += got.scores->At(0, 1, i, j);
      EXPECT_NEAR(sum, 1 - std::exp(1 - got.lse->At(0, 1, i, 0)), 2 * ToleranceOf(problem.dtype));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, SinkTest, ::testing::ValuesIn(Cases()), [](const auto& info) {
  return std::string(NameOf(info.param.dtype)) + "_q" + std::to_string(info.param.query_length) +
         "_k" + std::to_string(info.param.key_length);
});

TEST(MergeSinkTest, MergesOnceAfterAllParts) {
  // Two parts with sums of exponentials 2 and 5, then a sink of 1.
  std::vector<double> output = {3};
  double lse = std::log(2);
  MergeInto<double>(absl::MakeSpan(output), lse, std::vector<double>{10}, std::log(5));
  MergeSink(absl::MakeSpan(output), lse, 0.0);
  EXPECT_NEAR(output[0], (2 * 3 + 5 * 10) / 8.0, 1e-12);
  EXPECT_NEAR(lse, std::log(8), 1e-12);
}

}  // namespace
}  // namespace rapt::test
