#include "attention/problem_text.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "attention/attributes.h"
#include "attention/diagnosis.h"
#include "tests/support/table_values.h"

namespace rapt {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

Problem Parse(const std::string& text) {
  const auto problems = ParseProblems(text);
  EXPECT_TRUE(problems.ok()) << problems.status();
  EXPECT_EQ(problems->size(), 1);
  return problems->front();
}

TEST(ProblemTextTest, ASingleNumberAppliesToQueriesAndKeys) {
  const Problem p = Parse("2x8x1024x64");
  EXPECT_EQ(p.dtype, DType::kFloat32);
  EXPECT_EQ(p.batch, 2);
  EXPECT_EQ(p.query_heads, 8);
  EXPECT_EQ(p.kv_heads, 8);
  EXPECT_EQ(p.query_length, 1024);
  EXPECT_EQ(p.key_length, 1024);
  EXPECT_EQ(p.head_size, 64);
  EXPECT_EQ(p.value_head_size, 64);
  EXPECT_FALSE(p.causal);
}

TEST(ProblemTextTest, ReadsTypeAndAttributes) {
  const Problem p = Parse(
      " 8x32/8x16:4096x128/64 BF16 causal bottom_right ragged past=7 left_window=511 "
      "right_window=0 softcap=30 scale=0.5 ");
  EXPECT_EQ(p.dtype, DType::kBFloat16);
  EXPECT_EQ(p.query_heads, 32);
  EXPECT_EQ(p.kv_heads, 8);
  EXPECT_EQ(p.query_length, 16);
  EXPECT_EQ(p.key_length, 4096);
  EXPECT_EQ(p.head_size, 128);
  EXPECT_EQ(p.value_head_size, 64);
  EXPECT_TRUE(p.causal);
  EXPECT_EQ(p.alignment, Alignment::kBottomRight);
  EXPECT_TRUE(p.has_key_lengths);
  EXPECT_EQ(p.past_length, 7);
  EXPECT_EQ(p.left_window, 511);
  EXPECT_EQ(p.right_window, 0);
  EXPECT_EQ(p.softcap, 30);
  EXPECT_EQ(p.scale, 0.5);
  EXPECT_EQ(Parse("8x32x16x128 ragged onnx_alignment").alignment, Alignment::kOnnx);
}

TEST(ProblemTextTest, ReadsAndDescribesEveryAttributeOfTheTable) {
  for (const AttributeInfo& info : Attributes()) {
    if (!test::IsInProblem(info)) continue;
    const std::string value = test::UnusualText(info);
    const std::string word = absl::StrCat(info.c, value.empty() ? "" : "=", value);
    const std::string before = info.attribute == Attribute::kAlpha ? "normalizer=entmax " : "";
    EXPECT_THAT(Describe(Parse("2x8x1024x64 " + before + word)), HasSubstr(" " + word));
    EXPECT_THAT(Describe(Parse("2x8x1024x64")), Not(HasSubstr(" " + word)));
  }
}

TEST(ProblemTextTest, ReadsAndDescribesTheNormalizer) {
  EXPECT_EQ(Parse("2x8x1024x64 normalizer=softmax").normalizer, Normalizer::kSoftmax);
  for (const char* word : {" normalizer=sparsemax", " normalizer=entmax15"}) {
    EXPECT_THAT(Describe(Parse(std::string("2x8x1024x64") + word)), HasSubstr(word));
  }
  EXPECT_FALSE(ParseProblems("2x8x1024x64 normalizer=entmax16").ok());
}

TEST(ProblemTextTest, AMaskCoversAllQueriesAndKeys) {
  EXPECT_EQ(Parse("3x2x5:6x8 mask=bool past=4 fp16").mask->dtype, DType::kBool);
  EXPECT_THAT(Parse("3x2x5:6x8 mask=bool past=4").mask->dims, ElementsAre(1, 1, 5, 10));
  EXPECT_EQ(Parse("3x2x5:6x8 mask=float fp16").mask->dtype, DType::kFloat16);
  EXPECT_EQ(Parse("3x2x5:6x8 mask=padding").mask->dtype, DType::kBool);
  EXPECT_THAT(Parse("3x2x5:6x8 mask=padding").mask->dims, ElementsAre(3, 1, 1, 6));
}

TEST(ProblemTextTest, CommasSeparateProblems) {
  const auto problems = ParseProblems("1x1x8x8, 2x1x8x8 bf16,3x1x8x8");
  ASSERT_TRUE(problems.ok()) << problems.status();
  ASSERT_EQ(problems->size(), 3);
  EXPECT_EQ((*problems)[1].dtype, DType::kBFloat16);
  EXPECT_EQ((*problems)[2].dtype, DType::kFloat32);
  EXPECT_EQ((*problems)[2].batch, 3);
}

TEST(ProblemTextTest, QuotesTheInvalidProblem) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "'' is empty"},
      {"1x1x8x8,", "'' is empty"},
      {"1x1x8x8, 8x8x8", "'8x8x8' has 3 axes; it must have 4, BxHxSxD"},
      {"axbxcxd", "'axbxcxd' has an axis that is not a number"},
      {"1x8/2/1x8x8", "'1x8/2/1x8x8' has an axis that is not a number"},
      {"1x1x8x8 casual", "'1x1x8x8 casual' has the invalid word 'casual'"},
      {"1x1x8x8 past=", "has the invalid word 'past='"},
      {"1x1x8x8 past=1.5", "has the invalid word 'past=1.5'"},
      {"1x1x8x8 softcap=high", "has the invalid word 'softcap=high'"},
      {"1x1x8x8 mask=int", "has mask 'int'; it must be bool, float or padding"},
      {"1x6/4x8x8", "'1x6/4x8x8' is not a valid problem: "},
      {"1x1x8x-8", "'1x1x8x-8' is not a valid problem: "},
      {"1x1x8x8 softcap=-1", "is not a valid problem: "},
  };
  for (const auto& [text, message] : cases) {
    const auto problems = ParseProblems(text);
    EXPECT_EQ(problems.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(problems.status().message()), HasSubstr(message));
  }
}

}  // namespace
}  // namespace rapt
