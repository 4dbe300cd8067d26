#include "client/load/mix.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>

namespace rapt::load {
namespace {

using client::DType;
using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::HasSubstr;
using ::testing::SizeIs;

std::vector<CallShape> Parse(std::string_view text, int64_t variants = 4,
                             const ShapeDefaults& defaults = {}) {
  const auto shapes = ParseMix(text, variants, defaults);
  EXPECT_TRUE(shapes.ok()) << shapes.status();
  return shapes.value_or(std::vector<CallShape>());
}

TEST(MixTest, ReadsAxesAndWords) {
  const CallShape want{.batch = 8,
                       .query_heads = 32,
                       .kv_heads = 8,
                       .queries = 1,
                       .keys = 4096,
                       .head_size = 128,
                       .dtype = DType::kBFloat16,
                       .causal = true,
                       .ragged = true,
                       .mask = MaskKind::kPadding,
                       .weight = 2.5};
  EXPECT_THAT(Parse("8x32/8x1:4096x128 bf16 causal ragged mask=padding weight=2.5"),
              ElementsAre(want));
  EXPECT_EQ(Describe(want), "8x32/8x1:4096x128 BF16 causal ragged mask=padding");
}

TEST(MixTest, FillsInDefaults) {
  const auto shapes =
      Parse("1x2x3x4, 1x2x3x4 fp64 mask=none", 4, {DType::kFloat16, true, false, MaskKind::kBool});
  ASSERT_THAT(shapes, SizeIs(2));
  EXPECT_EQ(Describe(shapes[0]), "1x2x3x4 FP16 causal mask=bool");
  EXPECT_EQ(Describe(shapes[1]), "1x2x3x4 FP64 causal");
}

TEST(MixTest, ReadsFilesWithLinesAndComments) {
  EXPECT_THAT(Parse("# prompts\n1x1x2x4 weight=3\n\n1x1x8x4 # long\n"),
              ElementsAre(Field(&CallShape::queries, 2), Field(&CallShape::queries, 8)));
}

TEST(MixTest, ReplacesADistributionByItsQuantiles) {
  const auto uniform = Parse("1x1x100..500x4 weight=2");
  EXPECT_THAT(uniform, ElementsAre(Field(&CallShape::keys, 150), Field(&CallShape::keys, 250),
                                   Field(&CallShape::keys, 350), Field(&CallShape::keys, 450)));
  for (const CallShape& shape : uniform) {
    EXPECT_EQ(shape.queries, shape.keys);
    EXPECT_EQ(shape.weight, 0.5);
  }
  // 1000 exp(0.7 z), z at 1/6, 1/2 and 5/6 of the normal distribution.
  EXPECT_THAT(Parse("1x1x1:~1000x4", 3),
              ElementsAre(Field(&CallShape::keys, 508), Field(&CallShape::keys, 1000),
                          Field(&CallShape::keys, 1968)));
}

TEST(MixTest, KnowsTheNamedMixes) {
  EXPECT_THAT(Parse("tutorial"), SizeIs(4));
  EXPECT_THAT(Parse("prefill-decode", 5), SizeIs(7));
  EXPECT_THAT(Parse("tiny, short"), SizeIs(2));
}

TEST(MixTest, ErrorsStateTheReason) {
  for (const auto& [text, why] :
       std::map<const char*, const char*>{{"", "the mix is empty"},
                                          {"1x2x3", "3 axes"},
                                          {"1x2x3x4x5", "5 axes"},
                                          {"0x2x3x4", "invalid axis"},
                                          {"1x3/2x3x4", "not a multiple"},
                                          {"1x2x9..3x4", "invalid length"},
                                          {"1x2x~x4", "invalid length"},
                                          {"1x2x3x4 fp8", "'fp8'"},
                                          {"1x2x3x4 mask=x", "mask 'x'"},
                                          {"1x2x3x4 weight=0", "weight"},
                                          {"tutorials", "1 axes"}}) {
    const auto shapes = ParseMix(text, 4, {});
    EXPECT_EQ(shapes.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(shapes.status().message()), HasSubstr(why)) << text;
  }
}

TEST(ShapeChoiceTest, FollowsWeightsAndSeed) {
  const auto shapes = Parse("1x1x1x4 weight=1, 1x1x2x4 weight=3, 1x1x3x4 weight=6");
  const ShapeChoice choice(shapes, 5), same(shapes, 5), other(shapes, 6);
  std::vector<int> counts(3);
  int differences = 0;
  for (uint64_t n = 0; n < 10'000; ++n) {
    ++counts[choice(n)];
    EXPECT_EQ(choice(n), same(n));
    differences += choice(n) != other(n) ? 1 : 0;
  }
  EXPECT_NEAR(counts[0], 1000, 150);
  EXPECT_NEAR(counts[1], 3000, 200);
  EXPECT_NEAR(counts[2], 6000, 200);
  EXPECT_GT(differences, 1000);
}

}  // namespace
}  // namespace rapt::load
