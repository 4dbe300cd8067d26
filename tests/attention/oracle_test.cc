// Tests the oracle against published values and results computed by hand.
#include "tests/support/oracle.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace rapt::test {
namespace {

using ::testing::ElementsAre;

constexpr double kInf = std::numeric_limits<double>::infinity();

// Random123's kat_vectors, philox4x32 with 10 rounds.
TEST(PhiloxDrawsTest, KnownAnswers) {
  EXPECT_THAT(PhiloxDraws({0, 0, 0, 0}, {0, 0}),
              ElementsAre(0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8));
  constexpr uint32_t kOnes = 0xffffffff;
  EXPECT_THAT(PhiloxDraws({kOnes, kOnes, kOnes, kOnes}, {kOnes, kOnes}),
              ElementsAre(0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd));
  EXPECT_THAT(
      PhiloxDraws({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
      ElementsAre(0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1));
}

struct Rounding {
  double value;
  uint16_t half;
  uint16_t bfloat16;
};

TEST(TensorTest, RoundsHalfTypesToNearestEven) {
  const Rounding cases[] = {
      {0.0, 0x0000, 0x0000},
      {-0.0, 0x8000, 0x8000},
      {1.0, 0x3C00, 0x3F80},
      {-2.0, 0xC000, 0xC000},
      {1 + 0x1p-11, 0x3C00, 0x3F80},            // half way for fp16: down to even
      {1 + 0x3p-11, 0x3C02, 0x3F80},            // half way for fp16: up to even
      {1 + 0x1p-11 + 0x1p-30, 0x3C01, 0x3F80},  // above half way: no double rounding
      {1 + 0x1p-8, 0x3C04, 0x3F80},
      {1 + 0x3p-8, 0x3C0C, 0x3F82},
      {65504, 0x7BFF, 0x4780},
      {65519.99, 0x7BFF, 0x4780},
      {65520, 0x7C00, 0x4780},
      {0x1p-24, 0x0001, 0x3380},
      {0x1p-25, 0x0000, 0x3300},
      {0x3p-25, 0x0002, 0x33C0},
      {0x1p-14, 0x0400, 0x3880},
      {0x1.FF8p-15, 0x03FF, 0x3880},
      {0x1.FFCp-15, 0x0400, 0x3880},  // rounds up into the normal numbers
      {0x1p-133, 0x0000, 0x0001},
      {0x1.FEp127, 0x7C00, 0x7F7F},
      {0x1.FFp127, 0x7C00, 0x7F80},
      {kInf, 0x7C00, 0x7F80},
      {-kInf, 0xFC00, 0xFF80},
  };
  for (const Rounding& c : cases) {
    EXPECT_EQ(EncodeHalf(c.value), c.half) << c.value;
    EXPECT_EQ(EncodeBFloat16(c.value), c.bfloat16) << c.value;
  }
}

TEST(TensorTest, EveryHalfBitPatternSurvivesARoundTrip) {
  for (int bits = 0; bits < 0x10000; ++bits) {
    const auto pattern = static_cast<uint16_t>(bits);
    const double half = DecodeHalf(pattern);
    if (!std::isnan(half)) {
      ASSERT_EQ(EncodeHalf(half), pattern);
    }
    const double bfloat16 = DecodeBFloat16(pattern);
    if (!std::isnan(bfloat16)) {
      ASSERT_EQ(EncodeBFloat16(bfloat16), pattern);
    }
  }
  EXPECT_TRUE(std::isnan(DecodeHalf(EncodeHalf(std::nan("")))));
  EXPECT_TRUE(std::isnan(DecodeBFloat16(EncodeBFloat16(std::nan("")))));
}

TEST(TensorTest, EveryStorageHoldsTheSameElements) {
  for (const Storage storage :
       {Storage::kRowMajor, Storage::kBshd, Storage::kPositionFirst, Storage::kPaddedRows,
        Storage::kMisaligned, Storage::kTransposed, Storage::kElementsApart}) {
    Rng rng(7);
    Tensor tensor(DType::kFloat32, {2, 3, 4, 5}, storage, 16);
    const std::vector<double> values = tensor.FillUniform(rng, -1, 1).ToVector();
    Rng same(7);
    EXPECT_EQ(values, Tensor(DType::kFloat32, {2, 3, 4, 5}).FillUniform(same, -1, 1).ToVector());
    EXPECT_TRUE(tensor.GapsIntact());
    tensor.MutableView().data[-1] = std::byte{0};
    EXPECT_FALSE(tensor.GapsIntact());
  }
}

TEST(AllCloseTest, DistinguishesFiniteInfiniteAndNan) {
  Tensor got(DType::kFloat16, {1, 1, 1, 4});
  const double nan = std::nan("");
  const auto close = [&](std::vector<double> have, const std::vector<double>& want) {
    for (int64_t e = 0; e < 4; ++e) got.Set(0, 0, 0, e, have[e]);
    return static_cast<bool>(AllClose("got", got, want, {1e-3, {}}));
  };
  EXPECT_TRUE(close({1, nan, kInf, -kInf}, {1, nan, kInf, -kInf}));
  EXPECT_TRUE(close({1, 1, 1, 1}, {1.0019, 1, 0.9981, 1}));
  EXPECT_FALSE(close({1, 1, 1, 1}, {1, 1, 1, 1.0021}));
  EXPECT_FALSE(close({nan, 1, 1, 1}, {1, 1, 1, 1}));
  EXPECT_FALSE(close({1, 1, 1, 1}, {nan, 1, 1, 1}));
  EXPECT_FALSE(close({kInf, 1, 1, 1}, {1, 1, 1, 1}));
  EXPECT_FALSE(close({kInf, 1, 1, 1}, {-kInf, 1, 1, 1}));
  EXPECT_FALSE(close({65504, 1, 1, 1}, {kInf, 1, 1, 1}));
  EXPECT_TRUE(close({kInf, 1, 1, 1}, {70000, 1, 1, 1})) << "beyond the range of fp16";
  EXPECT_FALSE(close({-kInf, 1, 1, 1}, {70000, 1, 1, 1}));
  EXPECT_FALSE(close({65504, 1, 1, 1}, {70000, 1, 1, 1}));
}

// Two keys, D = 1: scores ln 3 and 0 weigh 3 : 1.
TEST(OracleTest, TwoKeysByHand) {
  Inputs inputs{.query = Tensor(DType::kFloat64, {1, 1, 1, 1}).Fill(1),
                .key = Tensor(DType::kFloat64, {1, 1, 2, 1}),
                .value = Tensor(DType::kFloat64, {1, 1, 2, 1})};
  inputs.key.Set(0, 0, 0, 0, std::log(3));
  inputs.key.Set(0, 0, 1, 0, 0);
  inputs.value.Set(0, 0, 0, 0, 8);
  inputs.value.Set(0, 0, 1, 0, 4);
  Problem problem{.dtype = DType::kFloat64,
                  .batch = 1,
                  .query_heads = 1,
                  .kv_heads = 1,
                  .query_length = 1,
                  .key_length = 2,
                  .head_size = 1,
                  .value_head_size = 1,
                  .score_output = ScoreOutput::kWeights};
  Expected expected = Attend(problem, inputs);
  EXPECT_THAT(expected.scores, ElementsAre(::testing::DoubleEq(0.75), ::testing::DoubleEq(0.25)));
  EXPECT_THAT(expected.output, ElementsAre(::testing::DoubleEq(7)));
  EXPECT_THAT(expected.lse, ElementsAre(::testing::DoubleEq(std::log(4))));

  problem.causal = true;  // top-left: the one query sees the first key
  expected = Attend(problem, inputs);
  EXPECT_THAT(expected.scores, ElementsAre(1, 0));
  EXPECT_THAT(expected.output, ElementsAre(8));

  problem.alignment = Alignment::kBottomRight;  // sees both
  EXPECT_THAT(Attend(problem, inputs).output, ElementsAre(::testing::DoubleEq(7)));

  problem.has_key_lengths = true;
  inputs.key_lengths = {0};
  expected = Attend(problem, inputs);
  EXPECT_THAT(expected.output, ElementsAre(0));
  EXPECT_THAT(expected.lse, ElementsAre(-kInf));
}

}  // namespace
}  // namespace rapt::test
