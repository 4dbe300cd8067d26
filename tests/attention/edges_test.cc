// Edge cases of attention: masked garbage, empty rows, infinities, ranges of types, empty axes.
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <tuple>
#include <vector>

#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
const double kNan = std::nan("");
constexpr uint64_t kSeed = 99;
constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat64};

// Backends may use different code for few query rows of whole vectors than for blocks of rows, and
// if no weights are requested.
struct Shape {
  const char* name;
  int64_t queries, head_size, value_head_size;
  bool weights = true;
};
constexpr Shape kShapes[] = {{"block", 9, 16, 20},
                             {"few", 3, 64, 32},
                             {"decode", 1, 32, 64},
                             {"fused", 21, 40, 24, /*weights=*/false},
                             {"fused_decode", 1, 40, 24, /*weights=*/false}};

// Every test of this file holds for each float type and shape.
class EdgesTest : public ::testing::TestWithParam<std::tuple<DType, Shape>> {
 protected:
  DType dtype() const { return std::get<DType>(GetParam()); }
  int64_t queries() const { return std::get<Shape>(GetParam()).queries; }

  Problem Make(const std::function<void(Problem&)>& change = [](Problem&) {}) const {
    const Shape& shape = std::get<Shape>(GetParam());
    Problem problem{.dtype = dtype(),
                    .batch = 2,
                    .query_heads = 4,
                    .kv_heads = 2,
                    .query_length = shape.queries,
                    .key_length = 140,
                    .head_size = shape.head_size,
                    .value_head_size = shape.value_head_size,
                    .wants_lse = true};
    if (shape.weights) problem.score_output = ScoreOutput::kWeights;
    change(problem);
    return problem;
  }

  // With a mask of that type with an element for each query and key.
  Problem Masked(DType mask) const {
    return Make([&](Problem& p) { p.mask = MaskShape{mask, {1, 1, queries(), 140}}; });
  }
};

INSTANTIATE_TEST_SUITE_P(Types, EdgesTest,
                         ::testing::Combine(::testing::ValuesIn(kFloatTypes),
                                            ::testing::ValuesIn(kShapes)),
                         [](const auto& info) {
                           return std::string(NameOf(std::get<DType>(info.param))) + "_" +
                                  std::get<Shape>(info.param).name;
                         });

void FillRow(Tensor& tensor, int64_t b, int64_t h, int64_t s, double value) {
  for (int64_t e = 0; e < tensor.dims()[3]; ++e) tensor.Set(b, h, s, e, value);
}

void Poison(Inputs& inputs, int64_t b, int64_t h, int64_t j, double value) {
  FillRow(inputs.key, b, h, j, value);
  FillRow(inputs.value, b, h, j, value);
}

// Fills every key and value that no query sees with NaN, infinities and large numbers, and expects
// the oracle's result for the clean ones.
void ExpectHiddenKeysDoNotMatter(const Problem& problem, const Inputs& clean) {
  const Expected expected = Attend(problem, clean);
  for (const double poison : {kNan, kInf, -kInf, MaxOf(problem.dtype)}) {
    Inputs poisoned = clean;
    int64_t hidden = 0;
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (int64_t kv = 0; kv < problem.kv_heads; ++kv) {
        for (int64_t j = 0; j < problem.key_length; ++j) {
          bool seen = false;
          for (int64_t g = 0; g < problem.group_size(); ++g) {
            const int64_t h = kv * problem.group_size() + g;
            for (int64_t i = 0; i < problem.query_length; ++i) {
              const bool masked = clean.mask && (clean.mask->dtype() == DType::kBool
                                                     ? clean.mask->At(b, h, i, j) == 0
                                                     : clean.mask->At(b, h, i, j) == -kInf);
              seen |= !masked && IsVisible(problem, clean.key_lengths, b, i, j);
            }
          }
          if (seen) continue;
          Poison(poisoned, b, kv, j, poison);
          ++hidden;
        }
      }
    }
    ASSERT_GT(hidden, 0) << "nothing is hidden, so nothing is tested";
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name() + " poison " + std::to_string(poison) + " " + ToText(problem));
      const auto outputs = RunAttention(problem, poisoned, target.Options());
      ASSERT_TRUE(outputs.ok()) << outputs.status();
      EXPECT_TRUE(Matches(problem, *outputs, expected));
    }
  }
}

TEST_P(EdgesTest, KeysMaskedByFalseNeverMatter) {
  const Problem problem = Make([](Problem& p) {
    p.mask = MaskShape{DType::kBool, {2, 1, 1, 140}};
  });
  Rng rng(kSeed);
  ExpectHiddenKeysDoNotMatter(problem, RandomInputs(problem, rng));
}

TEST_P(EdgesTest, KeysMaskedByMinusInfinityNeverMatter) {
  for (const DType mask : kFloatTypes) {
    const Problem problem = Make([&](Problem& p) { p.mask = MaskShape{mask, {2, 1, 1, 140}}; });
    Rng rng(kSeed);
    ExpectHiddenKeysDoNotMatter(problem, RandomInputs(problem, rng));
  }
}

TEST_P(EdgesTest, KeysMaskedByAWholeBlockNeverMatter) {
  const Problem problem = Make([](Problem& p) {
    p.mask = MaskShape{DType::kBool, {1, 1, 1, 140}};
  });
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  for (int64_t j = 0; j < 130; ++j) inputs.mask->Set(0, 0, 0, j, 0);
  ExpectHiddenKeysDoNotMatter(problem, inputs);
}

TEST_P(EdgesTest, KeysBeyondAShortMaskNeverMatter) {
  Problem problem = Make([](Problem& p) { p.mask = MaskShape{DType::kBool, {1, 1, 1, 101}}; });
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t j = 101; j < 140; ++j) Poison(inputs, b, 1, j, kNan);
  }
  ExpectConforms(problem, inputs);
  problem.mask->dtype = dtype();
  inputs.mask = Tensor(dtype(), problem.mask->dims).Fill(0.5);
  ExpectConforms(problem, inputs);
}

TEST_P(EdgesTest, KeysBehindTheDiagonalNeverMatter) {
  Rng rng(kSeed);
  const Problem problem = Make([](Problem& p) { p.causal = true; });
  ExpectHiddenKeysDoNotMatter(problem, RandomInputs(problem, rng));
}

TEST_P(EdgesTest, KeysOutsideOfTheWindowNeverMatter) {
  Rng rng(kSeed);
  const Problem problem = Make([](Problem& p) {
    p.left_window = 3;
    p.right_window = 50;
    p.alignment = Alignment::kBottomRight;
  });
  ExpectHiddenKeysDoNotMatter(problem, RandomInputs(problem, rng));
}

TEST_P(EdgesTest, KeysBeyondTheLengthNeverMatter) {
  Rng rng(kSeed);
  const Problem problem = Make([](Problem& p) { p.has_key_lengths = true; });
  Inputs inputs = RandomInputs(problem, rng);
  inputs.key_lengths = {77, 0};
  ExpectHiddenKeysDoNotMatter(problem, inputs);
}

// A key that one query sees and another does not: NaN for the first, no effect on the second.
TEST_P(EdgesTest, AKeyHiddenFromSomeQueriesPoisonsOnlyTheOthers) {
  Rng rng(kSeed);
  for (const ScoreOutput output : {ScoreOutput::kScores, ScoreOutput::kSoftcapped,
                                   ScoreOutput::kBiased, ScoreOutput::kWeights}) {
    const Problem problem = Make([&](Problem& p) {
      p.causal = true;
      p.score_output = output;
    });
    for (const double poison : {kNan, kInf}) {
      Inputs inputs = RandomInputs(problem, rng);
      inputs.key.Set(0, 0, 4, 7, poison);
      inputs.value.Set(1, 1, 6, 3, poison);
      ExpectConforms(problem, inputs);
    }
  }
}

// A row that sees the NaN has weights of NaN for the keys that it sees, of 0 for the others, in the
// block of the NaN and in later ones.
TEST_P(EdgesTest, HiddenKeysOfAPoisonedRowWeighNothing) {
  for (const Normalizer normalizer : {Normalizer::kSoftmax, Normalizer::kEntmax15}) {
    const Problem problem = Make([&](Problem& p) {
      p.mask = MaskShape{DType::kBool, {1, 1, 1, 140}};
      p.normalizer = normalizer;
      p.wants_lse = normalizer == Normalizer::kSoftmax;
      p.score_output = ScoreOutput::kWeights;
    });
    Rng rng(kSeed);
    Inputs inputs = RandomInputs(problem, rng);
    for (int64_t j = 0; j < 140; ++j) inputs.mask->Set(0, 0, 0, j, j % 3 == 0 ? 1 : 0);
    inputs.key.Set(0, 0, 3, 7, kNan);
    ExpectConforms(problem, inputs);
  }
}

TEST_P(EdgesTest, NanInAnyInputPropagatesLikeTheOracle) {
  const Problem problem = Make();
  for (const double poison : {kNan, kInf, -kInf}) {
    for (Tensor Inputs::*tensor : {&Inputs::query, &Inputs::key, &Inputs::value}) {
      Rng rng(kSeed);
      Inputs inputs = RandomInputs(problem, rng);
      (inputs.*tensor).Set(1, 1, queries() / 2, 11, poison);
      ExpectConforms(problem, inputs);
    }
  }
}

TEST_P(EdgesTest, NanAndInfinityInAMaskPropagateLikeTheOracle) {
  const Problem problem = Masked(DType::kFloat32);
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.mask->Set(0, 0, queries() / 2, 100, kNan);
  ExpectConforms(problem, inputs);
  inputs.mask->Set(0, 0, queries() - 1, 70, kInf);
  ExpectConforms(problem, inputs);
}

// Both infinities of V in one sum; a single one in the next column.
TEST_P(EdgesTest, OppositeInfinitiesInValuesGiveNan) {
  const Problem problem = Make();
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.value.Set(0, 0, 3, 0, kInf);
  inputs.value.Set(0, 0, 120, 0, -kInf);
  inputs.value.Set(0, 0, 64, 1, -kInf);
  ExpectConforms(problem, inputs);
}

TEST_P(EdgesTest, FullyMaskedRowsAreZeroWithLseMinusInfinity) {
  for (const DType mask : {DType::kBool, DType::kFloat32, DType::kFloat16}) {
    const Problem problem = Masked(mask);
    Rng rng(kSeed);
    Inputs inputs = RandomInputs(problem, rng);
    for (const int64_t i : {int64_t{0}, queries() / 2}) {
      FillRow(*inputs.mask, 0, 0, i, mask == DType::kBool ? 0 : -kInf);
    }
    ExpectConforms(problem, inputs);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const auto outputs = RunAttention(problem, inputs, target.Options());
      ASSERT_TRUE(outputs.ok()) << outputs.status();
      EXPECT_EQ(outputs->output.At(1, 3, queries() / 2, 19), 0);
      EXPECT_EQ(outputs->scores ? outputs->scores->At(1, 3, queries() / 2, 139) : 0, 0);
      EXPECT_EQ(outputs->lse->At(1, 3, queries() / 2, 0), -kInf);
    }
  }
}

TEST_P(EdgesTest, FullyMaskedRowsAreZeroEvenWhenEverythingIsNan) {
  const Problem problem = Make([](Problem& p) { p.mask = MaskShape{DType::kBool, {1, 1, 1, 1}}; });
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  for (Tensor* tensor : {&inputs.query, &inputs.key, &inputs.value}) tensor->Fill(kNan);
  inputs.mask->Fill(0);
  ExpectConforms(problem, inputs);
}

TEST_P(EdgesTest, ANegativeCausalOffsetLeavesTheFirstRowsEmpty) {
  Rng rng(kSeed);
  const Problem bottom_right = Make([](Problem& p) {
    p.query_length = 70;
    p.key_length = 5;
    p.causal = true;
    p.alignment = Alignment::kBottomRight;
  });
  ExpectConforms(bottom_right, RandomInputs(bottom_right, rng));
  const Problem lengths = Make([](Problem& p) {
    p.causal = true;
    p.has_key_lengths = true;
    p.alignment = Alignment::kOnnx;
  });
  Inputs inputs = RandomInputs(lengths, rng);
  inputs.key_lengths = {3, 0};
  ExpectConforms(lengths, inputs);
}

TEST_P(EdgesTest, AWindowBeyondAllKeysLeavesNothing) {
  Rng rng(kSeed);
  const Problem problem = Make([](Problem& p) {
    p.query_length = 200;
    p.key_length = 10;
    p.left_window = 4;
  });
  ExpectConforms(problem, RandomInputs(problem, rng));
}

TEST_P(EdgesTest, WindowsOfAnySizeDoNotOverflow) {
  Rng rng(kSeed);
  const Problem problem = Make([](Problem& p) {
    p.left_window = std::numeric_limits<int64_t>::max();
    p.right_window = std::numeric_limits<int64_t>::max();
    p.causal = true;
  });
  ExpectConforms(problem, RandomInputs(problem, rng));
}

TEST_P(EdgesTest, EmptyAxesGiveEmptyOutputs) {
  int64_t Problem::*const kAxes[] = {&Problem::batch, &Problem::query_length};
  for (int64_t Problem::*axis : kAxes) {
    const Problem problem = Make([&](Problem& p) { p.*axis = 0; });
    Rng rng(kSeed);
    ExpectConforms(problem, RandomInputs(problem, rng));
  }
  const Problem no_heads = Make([](Problem& p) { p.query_heads = p.kv_heads = 0; });
  Rng rng(kSeed);
  ExpectConforms(no_heads, RandomInputs(no_heads, rng));
}

TEST_P(EdgesTest, EmptyQueriesStillGivePresent) {
  const Problem problem = Make([](Problem& p) {
    p.query_length = 0;
    p.past_length = 3;
    p.wants_present = true;
  });
  Rng rng(kSeed);
  ExpectConforms(problem, RandomInputs(problem, rng));
}

TEST_P(EdgesTest, NoKeysGiveZeros) {
  for (const bool causal : {false, true}) {
    const Problem problem = Make([&](Problem& p) {
      p.key_length = 0;
      p.causal = causal;
    });
    Rng rng(kSeed);
    ExpectConforms(problem, RandomInputs(problem, rng), /*threads=*/2);
  }
}

TEST_P(EdgesTest, AMaskOfLastAxisOneBroadcasts) {
  for (const DType mask : {DType::kBool, DType::kFloat32}) {
    const Problem problem = Make([&](Problem& p) {
      p.mask = MaskShape{mask, {2, 4, queries(), 1}};
    });
    Rng rng(kSeed);
    ExpectConforms(problem, RandomInputs(problem, rng));
  }
}

// Many models use -1e6, -65504 and similar values instead of -inf.
TEST_P(EdgesTest, OneKeyAmongHugeNegativeMasksHasAllTheWeight) {
  for (const DType mask : kFloatTypes) {
    const Problem problem = Masked(mask);
    Rng rng(kSeed);
    Inputs inputs = RandomInputs(problem, rng);
    for (int64_t j = 0; j < 140; ++j) {
      if (j != 77) inputs.mask->Set(0, 0, queries() / 2, j, -MaxOf(mask));
    }
    ExpectConforms(problem, inputs);
  }
}

// The lowest finite number is not -inf: if a row has no other value, it absorbs the scores and
// gives all keys equal weight.
TEST_P(EdgesTest, ARowOfTheLowestMasksAveragesTheValues) {
  for (const DType mask : {DType::kFloat32, DType::kBFloat16, DType::kFloat64}) {
    Problem problem = Masked(mask);
    problem.wants_lse = false;
    problem.score_output.reset();
    Rng rng(kSeed);
    Inputs inputs = RandomInputs(problem, rng);
    inputs.mask->Fill(-MaxOf(mask));
    Problem average = problem;
    average.mask.reset();
    average.scale = 0;
    Inputs unmasked = inputs;
    unmasked.mask.reset();
    const Tolerance tolerance{ToleranceOf(dtype()), {}};
    const std::vector<double> want = Attend(average, unmasked).output;
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name() + " mask " + std::string(NameOf(mask)));
      const auto outputs = RunAttention(problem, inputs, target.Options());
      ASSERT_TRUE(outputs.ok()) << outputs.status();
      EXPECT_TRUE(AllClose("output", outputs->output, want, tolerance));
    }
  }
}

TEST_P(EdgesTest, LargeScoresDoNotOverflow) {
  for (const double scale : {1e4, -1e4}) {
    const Problem problem = Make([&](Problem& p) {
      p.scale = scale;
      p.score_output = std::nullopt;
    });
    Rng rng(kSeed);
    ExpectConforms(problem, RandomInputs(problem, rng, {}, 1));
  }
}

// The scores rise by 100 every 64 keys: a weight relative to an older maximum would overflow, and
// earlier sums must shrink to nothing.
TEST_P(EdgesTest, ScoresThatRiseAlongTheKeysDoNotOverflow) {
  const Problem problem = Make([](Problem& p) {
    p.key_length = 300;
    p.scale = 1;
  });
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t i = 0; i < queries(); ++i) inputs.query.Set(b, h, i, 0, 4);
    }
    for (int64_t kv = 0; kv < 2; ++kv) {
      for (int64_t j = 0; j < 300; ++j) inputs.key.Set(b, kv, j, 0, 25.0 * (j / 64));
    }
  }
  ExpectConforms(problem, inputs);
}

// The product of Q and K exceeds fp32, but the score does not.
TEST_P(EdgesTest, ASmallScaleBringsLargeProductsBack) {
  const double large = dtype() == DType::kFloat16 ? 0x1p15 : 0x1p70;
  const Problem problem = Make([](Problem& p) {
    p.scale = 0x1p-99;
    p.score_output = std::nullopt;
  });
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.query.Fill(0);
  inputs.key.Fill(0);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t i = 0; i < queries(); ++i) inputs.query.Set(b, h, i, 3, large);
    }
    for (int64_t kv = 0; kv < 2; ++kv) inputs.key.Set(b, kv, 77, 3, large);
  }
  ExpectConforms(problem, inputs);
}

// Q and K near the largest half: their products overflow a half type, but not fp32.
TEST_P(EdgesTest, ProductsBeyondTheTypeDoNotOverflowInside) {
  const Problem problem = Make([](Problem& p) {
    p.scale = 1e-9;
    p.wants_lse = true;
  });
  Rng rng(kSeed);
  const double magnitude = dtype() == DType::kFloat16 ? 65000 : 1e5;
  ExpectConforms(problem, RandomInputs(problem, rng, {}, magnitude));
}

// The sum of weights times values exceeds the largest half before it is divided by the sum of
// weights.
TEST_P(EdgesTest, ValuesNearTheLargestOfTheTypeDoNotOverflowInside) {
  const Problem problem = Make();
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  const double largest = dtype() == DType::kFloat16 ? 65504 : 1e30;
  inputs.value.Fill(largest);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const auto outputs = RunAttention(problem, inputs, target.Options());
    ASSERT_TRUE(outputs.ok()) << outputs.status();
    const std::vector<double> want(outputs->output.size(), RoundTo(dtype(), largest));
    EXPECT_TRUE(AllClose("output", outputs->output, want, {ToleranceOf(dtype()), {}}));
  }
}

TEST_P(EdgesTest, ScoresBeyondTheTypeAreInfinityInTheScoreOutputOnly) {
  const Problem problem = Make([](Problem& p) {
    p.scale = 1e4;
    p.score_output = ScoreOutput::kScores;
  });
  Rng rng(kSeed);
  ExpectConforms(problem, RandomInputs(problem, rng, {}, 4));
}

TEST_P(EdgesTest, ExtremeSoftcaps) {
  for (const double softcap : {1e-3, 1e-30, 1e4, 1e30}) {
    const Problem problem = Make([&](Problem& p) {
      p.softcap = softcap;
      p.score_output = ScoreOutput::kSoftcapped;
    });
    Rng rng(kSeed);
    ExpectConforms(problem, RandomInputs(problem, rng));
  }
}

TEST_P(EdgesTest, ScaleZeroAveragesVisibleValues) {
  const Problem problem = Make([](Problem& p) {
    p.scale = 0;
    p.causal = true;
  });
  Rng rng(kSeed);
  ExpectConforms(problem, RandomInputs(problem, rng));
}

TEST_P(EdgesTest, NegativeScale) {
  const Problem problem = Make([](Problem& p) { p.scale = -3; });
  Rng rng(kSeed);
  ExpectConforms(problem, RandomInputs(problem, rng));
}

TEST_P(EdgesTest, SubnormalInputsAreNumbers) {
  const Problem problem = Make([](Problem& p) { p.scale = 1e6; });
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  const double tiny = dtype() == DType::kFloat16 ? 0x1p-24 : 0x1p-130;
  inputs.key.FillUniform(rng, -64 * tiny, 64 * tiny);
  inputs.value.FillUniform(rng, -64 * tiny, 64 * tiny);
  ExpectConforms(problem, inputs);
}

// Subnormals of fp16 are normal in fp32 and must not be flushed.
TEST(HalfEdgesTest, SubnormalHalvesAreNotFlushed) {
  Problem problem{.dtype = DType::kFloat16,
                  .batch = 1,
                  .query_heads = 1,
                  .kv_heads = 1,
                  .query_length = 3,
                  .key_length = 70,
                  .head_size = 17,
                  .value_head_size = 17,
                  .scale = 0x1p14,
                  .wants_lse = true};
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.key.FillUniform(rng, -0x1p-15, 0x1p-15);
  inputs.value.FillUniform(rng, -0x1p-15, 0x1p-15);
  ExpectConforms(problem, inputs);
}

// A single key has weight 1, so every half, including subnormals and infinities, is returned
// unchanged.
TEST(HalfEdgesTest, ASingleKeyReturnsEveryValueExactly) {
  constexpr int64_t kRows = 128;
  constexpr int64_t kColumns = 512;
  for (const DType dtype : {DType::kFloat16, DType::kBFloat16}) {
    const Problem problem{.dtype = dtype,
                          .batch = kRows,
                          .query_heads = 1,
                          .kv_heads = 1,
                          .query_length = 1,
                          .key_length = 1,
                          .head_size = 1,
                          .value_head_size = kColumns};
    Rng rng(kSeed);
    Inputs inputs = RandomInputs(problem, rng);
    std::vector<double> want;
    for (int bits = 0; bits < kRows * kColumns; ++bits) {
      const auto pattern = static_cast<uint16_t>(bits);
      double value = dtype == DType::kFloat16 ? DecodeHalf(pattern) : DecodeBFloat16(pattern);
      // Kernels may flush values that are tiny even for fp32.
      if (std::abs(value) < 1e-30) value = 0;
      inputs.value.Set(bits / kColumns, 0, 0, bits % kColumns, value);
      want.push_back(value);
    }
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const auto outputs = RunAttention(problem, inputs, target.Options());
      ASSERT_TRUE(outputs.ok()) << outputs.status();
      EXPECT_TRUE(AllClose("output", outputs->output, want, {}));
    }
  }
}

// Dot products of bf16 flush subnormal factors and products, which make large scores here.
TEST(BFloat16EdgesTest, TinyNumbersBesideLargeOnesCount) {
  struct Case {
    double query, key, scale;
  };
  for (const Case& c :
       {Case{0x1p127, 0x1p-127, 1}, Case{0x1p-127, 0x1p127, 1}, Case{0x1p-64, 0x1p-64, 0x1p125}}) {
    const Problem problem{.dtype = DType::kBFloat16,
                          .batch = 1,
                          .query_heads = 1,
                          .kv_heads = 1,
                          .query_length = 1,
                          .key_length = 2,
                          .head_size = 32,
                          .value_head_size = 32,
                          .scale = c.scale};
    Rng rng(kSeed);
    Inputs inputs = RandomInputs(problem, rng);
    FillRow(inputs.query, 0, 0, 0, c.query);
    FillRow(inputs.key, 0, 0, 0, c.key);
    FillRow(inputs.key, 0, 0, 1, 0);
    SCOPED_TRACE(c.scale);
    ExpectConforms(problem, inputs);
  }
}

TEST(LseTest, IsFp64ForFp64InputsAndFp32Otherwise) {
  for (const DType dtype : kFloatTypes) {
    const Problem problem{.dtype = dtype,
                          .batch = 1,
                          .query_heads = 1,
                          .kv_heads = 1,
                          .query_length = 2,
                          .key_length = 5,
                          .head_size = 4,
                          .value_head_size = 4,
                          .wants_lse = true};
    EXPECT_EQ(problem.lse_dtype(), dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
    Rng rng(kSeed);
    ExpectConforms(problem, RandomInputs(problem, rng));
  }
}

}  // namespace
}  // namespace rapt::test
