// V as a part of K, on every backend and instruction set, in every type.
#include <gtest/gtest.h>

#include <limits>
#include <string>

#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

constexpr uint64_t kSeed = 20241126;

class ValuesInKeysTest : public ::testing::TestWithParam<DType> {
 protected:
  static Problem Make() {
    return {.dtype = GetParam(),
            .batch = 2,
            .query_heads = 6,
            .kv_heads = 1,
            .query_length = 17,
            .key_length = 70,
            .head_size = 40,
            .value_head_size = 33,
            .values_in_keys = true,
            .causal = true,
            .alignment = Alignment::kBottomRight,
            .wants_lse = true};
  }

  // V and past_value must not be read.
  static Inputs InputsFor(const Problem& problem, const Arrangement& arrangement = {}) {
    Rng rng(kSeed);
    Inputs inputs = RandomInputs(problem, rng, arrangement);
    inputs.value.Fill(std::numeric_limits<double>::quiet_NaN());
    if (inputs.past_value) inputs.past_value->Fill(std::numeric_limits<double>::quiet_NaN());
    return inputs;
  }
};

TEST_P(ValuesInKeysTest, MatchesTheDefinition) {
  Problem prefill = Make();
  Problem decode = Make();
  decode.query_length = 1;
  decode.past_length = 66;
  decode.wants_present = true;
  Problem one_head = decode;
  one_head.query_heads = 1;  // in place
  Problem whole = Make();
  whole.value_head_size = whole.head_size;
  whole.score_output = ScoreOutput::kWeights;
  for (const Problem& problem : {prefill, decode, one_head, whole}) {
    for (const Storage storage : {Storage::kRowMajor, Storage::kBshd, Storage::kMisaligned}) {
      ExpectConforms(problem, InputsFor(problem, {storage, storage, storage}));
    }
  }
}

TEST_P(ValuesInKeysTest, MatchesTheDefinitionWithSplitKeys) {
  Problem problem = Make();
  problem.query_length = 1;
  problem.query_heads = 4;
  problem.key_length = 2200;
  ExpectConforms(problem, InputsFor(problem), /*threads=*/16);
}

TEST_P(ValuesInKeysTest, ChangesNoBit) {
  const Problem problem = Make();
  const Inputs inputs = InputsFor(problem);
  Problem copied = problem;
  copied.values_in_keys = false;
  Inputs with_values = inputs;
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t j = 0; j < problem.key_length; ++j) {
      for (int64_t d = 0; d < problem.value_head_size; ++d) {
        with_values.value.Set(b, 0, j, d, inputs.key.At(b, 0, j, d));
      }
    }
  }
  ExpectSameOutputs(problem, inputs, copied, with_values);
}

INSTANTIATE_TEST_SUITE_P(Types, ValuesInKeysTest,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                           DType::kFloat64),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

}  // namespace
}  // namespace rapt::test
