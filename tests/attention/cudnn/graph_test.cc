#include "attention/cudnn/graph.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <set>
#include <string>
#include <vector>

#include "tests/support/oracle.h"
#include "tests/support/run_attention.h"

namespace rapt::cudnn {
namespace {

using test::IsVisible;
using test::Rng;
using test::UniformInt;
using ::testing::HasSubstr;

constexpr uint64_t kSeed = 71;

Problem Small() {
  return {.dtype = DType::kBFloat16,
          .batch = 2,
          .query_heads = 4,
          .kv_heads = 2,
          .query_length = 40,
          .key_length = 72,
          .head_size = 64,
          .value_head_size = 48};
}

// Returns whether query i of batch row b sees key j in the graph, both counted as in the problem.
// Applies cuDNN's documentation of bounds and lengths to the keys of KeysOf(), one by one.
bool GraphSees(const Problem& p, const std::vector<int64_t>& lengths, int64_t b, int64_t i,
               int64_t j) {
  const Crop crop = CropOf(p);
  const int64_t row = i - crop.first_query;
  if (crop.empty() || row < 0 || row >= crop.queries) return false;
  const SentKeys sent = KeysOf(p, lengths, b);
  const int64_t column = j - sent.first;
  if (column < 0 || column >= sent.count) return false;
  const SdpaGraph g = GraphOf(p);
  // Without lengths both axes are used in full.
  EXPECT_TRUE(g.has_lengths || (g.query_length == crop.queries && g.key_length == sent.count))
      << g.Key();
  EXPECT_LE(sent.count, g.key_length);
  const int64_t diagonal = row + (g.bottom_right ? sent.count - crop.queries : 0);
  if (g.left_bound && column <= diagonal - *g.left_bound) return false;
  if (g.right_bound && column > diagonal + *g.right_bound) return false;
  return true;
}

Problem RandomPositions(Rng& rng) {
  Problem p = Small();
  p.query_length = UniformInt(rng, 1, 12);
  p.key_length = UniformInt(rng, 1, 12);
  p.past_length = UniformInt(rng, 0, 2) == 0 ? UniformInt(rng, 1, 7) : 0;
  p.has_key_lengths = UniformInt(rng, 0, 2) == 0;
  p.causal = UniformInt(rng, 0, 1) == 0;
  p.alignment = static_cast<Alignment>(UniformInt(rng, 0, 2));
  if (UniformInt(rng, 0, 1) == 0) p.left_window = UniformInt(rng, 0, 9);
  if (UniformInt(rng, 0, 1) == 0) p.right_window = UniformInt(rng, 0, 9);
  return p;
}

TEST(CudnnGraphTest, EveryQuerySeesTheKeysOfTheDefinition) {
  Rng rng(kSeed);
  int compared = 0;
  for (int n = 0; n < 4000; ++n) {
    const Problem p = RandomPositions(rng);
    if (!Validate(p).ok() || !Supports(p).ok()) continue;
    ++compared;
    std::vector<int64_t> lengths;
    if (p.has_key_lengths) lengths = {UniformInt(rng, 0, p.key_length), p.key_length};
    for (int64_t b = 0; b < p.batch; ++b) {
      for (int64_t i = 0; i < p.query_length; ++i) {
        for (int64_t j = 0; j < p.total_keys(); ++j) {
          ASSERT_EQ(GraphSees(p, lengths, b, i, j), IsVisible(p, lengths, b, i, j))
              << test::ToText(p) << " b=" << b << " i=" << i << " j=" << j
              << " length=" << (lengths.empty() ? -1 : lengths[b]);
        }
      }
    }
  }
  EXPECT_GT(compared, 2000);
}

TEST(CudnnGraphTest, SectionsSeeTheSameKeys) {
  Rng rng(kSeed);
  int compared = 0;
  for (int n = 0; n < 4000; ++n) {
    const Problem whole = RandomPositions(rng);
    if (!Validate(whole).ok()) continue;
    Problem part = whole;
    Section section{.query_length = whole.query_length,
                    .key_length = whole.key_length,
                    .past_length = whole.past_length};
    section.first_query = UniformInt(rng, 0, whole.query_length - 1);
    section.first_key = UniformInt(rng, 0, whole.total_keys() - 1);
    part.query_length = UniformInt(rng, 1, whole.query_length - section.first_query);
    part.key_length = UniformInt(rng, 1, whole.total_keys() - section.first_key);
    part.past_length = 0;
    part.section = section;
    if (!Supports(part).ok()) continue;
    ++compared;
    std::vector<int64_t> lengths;
    if (whole.has_key_lengths) lengths = {UniformInt(rng, 0, whole.key_length), whole.key_length};
    for (int64_t b = 0; b < whole.batch; ++b) {
      for (int64_t i = 0; i < part.query_length; ++i) {
        for (int64_t j = 0; j < part.key_length; ++j) {
          ASSERT_EQ(GraphSees(part, lengths, b, i, j),
                    IsVisible(whole, lengths, b, section.first_query + i, section.first_key + j))
              << test::ToText(part) << " b=" << b << " i=" << i << " j=" << j;
        }
      }
    }
  }
  EXPECT_GT(compared, 2000);
}

TEST(CudnnGraphTest, StaysWithinTheLimitsOfCudnn) {
  Rng rng(kSeed);
  for (int n = 0; n < 4000; ++n) {
    Problem p = RandomPositions(rng);
    p.head_size = UniformInt(rng, 1, 256);
    p.value_head_size = UniformInt(rng, 1, 256);
    if (UniformInt(rng, 0, 1) == 0) {
      p.mask = MaskShape{.dtype = DType::kBool, .dims = {1, 1, 1, p.total_keys()}};
    }
    if (!Validate(p).ok() || !Supports(p).ok() || CropOf(p).empty()) continue;
    const SdpaGraph g = GraphOf(p);
    EXPECT_EQ(g.head_size % 8, 0);
    EXPECT_EQ(g.value_head_size % 8, 0);
    EXPECT_EQ(g.key_length % 8, 0) << "rows of a bias are whole multiples of 16 bytes";
    EXPECT_GE(g.right_bound.value_or(0), 0) << g.Key();
    EXPECT_GE(g.left_bound.value_or(1), 1) << g.Key();
    EXPECT_FALSE(g.bottom_right && g.bias) << g.Key();
    EXPECT_TRUE(!g.bottom_right || g.has_lengths || g.query_length <= g.key_length) << g.Key();
    EXPECT_TRUE(!g.left_bound || g.has_lengths || g.query_length <= g.key_length) << g.Key();
  }
}

TEST(CudnnGraphTest, UnsupportedProblemsReportTheReason) {
  struct Case {
    void (*change)(Problem&);
    const char* reason;
  };
  const Case cases[] = {
      {[](Problem& p) { p.dtype = DType::kFloat64; }, "FP64"},
      {[](Problem& p) { p.softmax_in_fp64 = true; }, "FP64"},
      {[](Problem& p) {
         p.mask = MaskShape{DType::kFloat64, {1, 1, 40, 72}};
       },
       "FP64 mask"},
      {[](Problem& p) { p.values_in_keys = true; }, "values inside the keys"},
      {[](Problem& p) { p.alibi = true; }, "biases by distance"},
      {[](Problem& p) { p.relative_keys = RelativeVectors{}; }, "relative_keys"},
      {[](Problem& p) { p.relative_values = RelativeVectors{}; }, "relative_values"},
      {[](Problem& p) {
         p.score_function = ScoreFunction::kAdditive;
         p.additive_weight = AdditiveWeight{};
       },
       "additive scores"},
      {[](Problem& p) { p.dropout = Dropout{.probability = 0.1}; }, "dropout"},
      {[](Problem& p) { p.score_output = ScoreOutput::kWeights; }, "scores"},
      {[](Problem& p) { p.head_size = 257; }, "head size above 256"},
      {[](Problem& p) { p.value_head_size = 512; }, "head size above 256"},
      {[](Problem& p) { p.scale = 1e31; }, "scale"},
      {[](Problem& p) { p.softcap = 1e-31; }, "softcap"},
      {[](Problem& p) { p.key_length = (1 << 24) + 1; }, "16777216 queries or keys"},
      {[](Problem& p) {
         p.causal = true;
         p.has_key_lengths = true;
         p.alignment = Alignment::kOnnx;
         p.mask = MaskShape{DType::kBool, {1, 1, 40, 72}};
       },
       "mask with a diagonal"},
      {[](Problem& p) {
         p.causal = true;
         p.has_key_lengths = true;
         p.alignment = Alignment::kBottomRight;
       },
       "several queries aligned with the last key"},
      {[](Problem& p) {
         p.query_length = 1;
         p.causal = true;
         p.alignment = Alignment::kBottomRight;
         p.left_window = 8;
         p.has_key_lengths = true;
         p.mask = MaskShape{DType::kBool, {1, 1, 1, 72}};
       },
       "mask with a window"},
  };
  EXPECT_TRUE(Supports(Small()).ok());
  for (const Case& c : cases) {
    Problem p = Small();
    c.change(p);
    ASSERT_TRUE(Validate(p).ok()) << test::ToText(p);
    const absl::Status status = Supports(p);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.reason));
  }
}

TEST(CudnnGraphTest, GradientsAreDeclinedWithTheReason) {
  struct Case {
    void (*change)(Problem&);
    const char* reason;
  };
  const Case cases[] = {
      {[](Problem& p) { p.dtype = DType::kFloat32; }, "gradients in FP32"},
      {[](Problem& p) { p.backward->has_lse_gradient = true; }, "a gradient of lse"},
      {[](Problem& p) { p.backward->has_forward = false; }, "without Y and lse"},
      {[](Problem& p) {
         p.mask = MaskShape{DType::kFloat32, {1, 1, p.query_length, p.total_keys()}};
         p.backward->gradients.Add(Role::kDMask);
       },
       "the gradient of an attn_mask"},
      {[](Problem& p) { p.softcap = 30; }, "through a softcap"},
      {[](Problem& p) { p.dropout = Dropout{.probability = 0.1}; }, "dropout"},
  };
  for (const Case& c : cases) {
    Problem p = Small();
    p.backward = Backward{.has_forward = true};
    p.backward->gradients.Add(Role::kDQ);
    c.change(p);
    ASSERT_TRUE(Validate(p).ok()) << Validate(p);
    const absl::Status status = Supports(p);
    EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.reason));
  }
}

TEST(CudnnGraphTest, ADecodedTokenSendsOnlyTheKeysOfItsWindow) {
  Problem p = Small();
  p.query_length = 1;
  p.key_length = 1;
  p.past_length = 4095;
  p.causal = true;
  p.left_window = 1023;
  const SentKeys sent = KeysOf(p, {}, 0);
  EXPECT_EQ(sent.first, 3072);
  EXPECT_EQ(sent.count, 1024);
  const SdpaGraph g = GraphOf(p);
  EXPECT_EQ(g.key_length, 1024);
  EXPECT_EQ(g.left_bound, std::nullopt);
  EXPECT_EQ(g.right_bound, std::nullopt);
  EXPECT_FALSE(g.has_lengths);
}

TEST(CudnnGraphTest, LengthsAreRoundedUpByAnEighthAtMost) {
  std::set<int64_t> lengths;
  for (int64_t n = 1; n <= 4096; ++n) {
    const int64_t rounded = RoundUpLength(n);
    EXPECT_GE(rounded, n);
    EXPECT_LE(rounded, std::max<int64_t>(n + 7, n + n / 8 + 1));
    EXPECT_EQ(RoundUpLength(rounded), rounded);
    lengths.insert(rounded);
  }
  EXPECT_LE(lengths.size(), 16 + 5 * 8) << "few plans serve every length";
  EXPECT_EQ(RoundUpLength(8192), 8192);
}

TEST(CudnnGraphTest, DifferentGraphsHaveDifferentKeys) {
  Problem p = Small();
  std::set<std::string> keys = {GraphOf(p).Key()};
  for (void (*change)(Problem&) : std::initializer_list<void (*)(Problem&)>{
           [](Problem& q) { q.dtype = DType::kFloat16; }, [](Problem& q) { q.batch = 3; },
           [](Problem& q) { q.query_heads = 8; }, [](Problem& q) { q.kv_heads = 4; },
           [](Problem& q) { q.query_length = 80; }, [](Problem& q) { q.key_length = 80; },
           [](Problem& q) { q.head_size = 72; }, [](Problem& q) { q.value_head_size = 56; },
           [](Problem& q) { q.softcap = 30; }, [](Problem& q) { q.causal = true; },
           [](Problem& q) { q.left_window = 3; }, [](Problem& q) { q.right_window = 3; },
           [](Problem& q) { q.has_key_lengths = true; },
           [](Problem& q) {
             q.mask = MaskShape{DType::kBool, {1, 1, 40, 72}};
           },
           [](Problem& q) {
             q.mask = MaskShape{DType::kFloat32, {1, 1, 40, 72}};
           },
           [](Problem& q) {
             q.mask = MaskShape{DType::kBool, {2, 1, 40, 72}};
           },
           [](Problem& q) { q.backward = Backward{.has_forward = true}; }}) {
    Problem other = p;
    change(other);
    EXPECT_TRUE(keys.insert(GraphOf(other).Key()).second) << GraphOf(other).Key();
  }
}

TEST(CudnnGraphTest, ScalesShareKernels) {
  Problem p = Small();
  const std::string key = GraphOf(p).Key();
  p.scale = 0.7;
  EXPECT_EQ(GraphOf(p).Key(), key);
}

// Appends 300 tokens at a time to a growing past.
TEST(CudnnGraphTest, ChunkedPrefillNeedsFewKernels) {
  for (const int64_t left_window : {-1, 500}) {
    std::set<std::string> keys;
    for (int64_t past = 300; past < 30'000; past += 300) {
      Problem p = Small();
      p.query_length = p.key_length = 300;
      p.past_length = past;
      p.causal = true;
      p.left_window = left_window;
      keys.insert(GraphOf(p).Key());
    }
    EXPECT_LE(keys.size(), left_window < 0 ? 8u * 8u : 2u);
  }
}

TEST(CudnnGraphTest, AllLengthsShareFewRaggedGraphs) {
  const SdpaGraph padded = GraphOf(Small());
  std::set<std::string> keys;
  for (const int64_t batch : {1, 2, 4, 5, 16, 33, 64}) {
    for (int64_t length = 1; length <= 8192; length += 37) {
      for (const int64_t queries : {int64_t{1}, length}) {
        const SdpaGraph ragged = RaggedOf(padded, batch, queries, length);
        EXPECT_TRUE(ragged.ragged && ragged.has_lengths);
        EXPECT_GE(ragged.batch, batch);
        EXPECT_GE(ragged.query_length, queries);
        EXPECT_GE(ragged.key_length, length);
        EXPECT_EQ(ragged.query_length == 1, queries == 1);
        keys.insert(ragged.Key());
      }
    }
  }
  EXPECT_EQ(keys.size(), 3u * 2u * 7u);
  EXPECT_EQ(keys.count(GraphOf(Small()).Key()), 0u);
}

TEST(CudnnGraphTest, ABiasOrASoftcapHasNoRaggedGraph) {
  EXPECT_TRUE(MayBeRagged(GraphOf(Small())));
  Problem softcap = Small();
  softcap.softcap = 30;
  EXPECT_FALSE(MayBeRagged(GraphOf(softcap)));
  Problem mask = Small();
  mask.mask = MaskShape{DType::kBool, {1, 1, 1, 1}};
  EXPECT_FALSE(MayBeRagged(GraphOf(mask)));
}

}  // namespace
}  // namespace rapt::cudnn
