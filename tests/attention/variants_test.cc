#include "attention/variants.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

namespace rapt {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> UsedBy(const Problem& problem) {
  std::vector<std::string> names;
  for (const VariantInfo& variant : Variants()) {
    if (variant.used(problem)) names.emplace_back(variant.name);
  }
  return names;
}

TEST(VariantsTest, EachIsUsedByItsFields) {
  const struct {
    void (*set)(Problem& p);
    const char* variant;
  } cases[] = {
      {[](Problem& p) { p.backward.emplace(); }, "backward"},
      {[](Problem& p) { p.head_sink = DType::kFloat32; }, "head_sink"},
      {[](Problem& p) { p.values_in_keys = true; }, "v_head_size"},
      {[](Problem& p) { p.rope_theta = 10000; }, "rotary"},
      {[](Problem& p) { p.rotary_cache.emplace(); }, "rotary"},
      {[](Problem& p) { p.alibi = true; }, "alibi"},
      {[](Problem& p) { p.alibi_slopes.emplace(); }, "alibi"},
      {[](Problem& p) { p.bias_table.emplace(); }, "bias_table"},
      {[](Problem& p) { p.relative_bias.emplace(); }, "relative_bias"},
      {[](Problem& p) { p.relative_keys.emplace(); }, "relative_vectors"},
      {[](Problem& p) { p.relative_values.emplace(); }, "relative_vectors"},
      {[](Problem& p) { p.score_function = ScoreFunction::kAdditive; }, "additive"},
      {[](Problem& p) { p.normalizer = Normalizer::kSparsemax; }, "sparsemax"},
      {[](Problem& p) { p.normalizer = Normalizer::kEntmax15; }, "entmax15"},
      {[](Problem& p) { p.normalizer = Normalizer::kEntmax; }, "entmax"},
      {[](Problem& p) { p.block_mask.emplace(); }, "block_mask"},
      {[](Problem& p) { p.selected.emplace(); }, "selected_indices"},
      {[](Problem& p) { p.prefix_keys = 4; }, "prefix_keys"},
      {[](Problem& p) { p.has_global_mask = true; }, "global_mask"},
  };
  for (const auto& c : cases) {
    Problem problem;
    c.set(problem);
    EXPECT_THAT(UsedBy(problem), ElementsAre(c.variant));
  }
}

TEST(VariantsTest, PlainUsesNoOther) {
  EXPECT_THAT(UsedBy({}), ElementsAre("plain"));
  EXPECT_THAT(UsedBy({.softcap = 30, .causal = true, .left_window = 8}), ElementsAre("plain"));
}

TEST(VariantsTest, AProblemMayUseSeveral) {
  const Problem problem = {.head_sink = DType::kFloat32, .rope_theta = 10000, .prefix_keys = 4};
  EXPECT_THAT(UsedBy(problem), ElementsAre("head_sink", "rotary", "prefix_keys"));
}

}  // namespace
}  // namespace rapt
