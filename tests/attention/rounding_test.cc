// Outputs of half types are rounded to nearest even. The tolerances would not detect truncation.
#include <gtest/gtest.h>

#include <cmath>
#include <string>

#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

// Four keys of equal weight: Y is the mean of V, exact in fp32.
void ExpectMeanRoundsTo(DType dtype, double step, double fourth_value_steps, double want_steps) {
  const Problem problem{.dtype = dtype,
                        .batch = 1,
                        .query_heads = 1,
                        .kv_heads = 1,
                        .query_length = 1,
                        .key_length = 4,
                        .head_size = 1,
                        .value_head_size = 1};
  Inputs inputs;
  inputs.query = Tensor(dtype, {1, 1, 1, 1}).Fill(0);
  inputs.key = Tensor(dtype, {1, 1, 4, 1}).Fill(0);
  inputs.value = Tensor(dtype, {1, 1, 4, 1}).Fill(1);
  inputs.value.Set(0, 0, 3, 0, 1 + fourth_value_steps * step);
  for (const Target& target : Targets()) {
    const auto outputs = RunAttention(problem, inputs, target.Options());
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    EXPECT_EQ(outputs->output.At(0, 0, 0, 0), 1 + want_steps * step)
        << target.Name() << " " << NameOf(dtype) << ": 1 + " << fourth_value_steps / 4 << " steps";
  }
}

TEST(RoundingTest, OutputsOfHalfTypesRoundToNearestEven) {
  for (const auto& [dtype, step] : {std::pair{DType::kFloat16, std::ldexp(1.0, -10)},
                                    std::pair{DType::kBFloat16, std::ldexp(1.0, -7)}}) {
    ExpectMeanRoundsTo(dtype, step, 1, 0);  // a quarter of a step
    ExpectMeanRoundsTo(dtype, step, 2, 0);  // half a step, to even
    ExpectMeanRoundsTo(dtype, step, 3, 1);
    ExpectMeanRoundsTo(dtype, step, 6, 2);  // one and a half, to even
  }
}

}  // namespace
}  // namespace rapt::test
