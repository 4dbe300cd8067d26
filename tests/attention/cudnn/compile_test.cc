// The real cuDNN compiles kernels for a GPU that is only described. cuDNN must support what
// Supports() accepts, and reject what Supports() rejects because of cuDNN.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <iterator>
#include <regex>
#include <string>
#include <vector>

#include "attention/cudnn/cost_model.h"
#include "attention/cudnn/device.h"
#include "attention/cudnn/graph.h"
#include "attention/cudnn/library.h"
#include "tests/support/run_attention.h"

namespace rapt::cudnn {
namespace {

using ::testing::HasSubstr;

const Library& Cudnn() {
  static const absl::StatusOr<const Library*> library = Library::Load(RAPT_CUDNN_LIBRARIES);
  if (!library.ok()) {
    ADD_FAILURE() << library.status();
    std::abort();
  }
  return **library;
}

std::string Properties() {
  std::ifstream file(RAPT_DEVICE_PROPERTIES);
  return {std::istreambuf_iterator<char>(file), {}};
}

struct Case {
  const char* name;
  Problem problem;
};

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

// Llama's heads by default.
Problem Of(int64_t queries, int64_t keys) {
  return {.dtype = DType::kBFloat16,
          .batch = 2,
          .query_heads = 32,
          .kv_heads = 8,
          .query_length = queries,
          .key_length = keys,
          .head_size = 128,
          .value_head_size = 128};
}

Problem With(Problem problem, void (*change)(Problem&)) {
  change(problem);
  return problem;
}

// The diagonal depends on each batch row's length.
void CausalOfLengths(Problem& p) {
  p.causal = true, p.has_key_lengths = true, p.alignment = Alignment::kOnnx;
}

std::vector<Case> Cases() {
  const Problem square = Of(1024, 1024);
  const DeviceSamples samples(32768, /*lanes=*/1);
  const Problem mask = With(square, [](Problem& p) {
    p.mask = MaskShape{DType::kBool, {1, 1, 1024, 1024}};
  });
  return {
      {"Bf16", square},
      {"Fp16", With(square, [](Problem& p) { p.dtype = DType::kFloat16; })},
      {"Fp32", With(square, [](Problem& p) { p.dtype = DType::kFloat32; })},
      {"Fp32Causal", With(square, [](Problem& p) { p.dtype = DType::kFloat32, p.causal = true; })},
      {"Fp32Lengths",
       With(square, [](Problem& p) { p.dtype = DType::kFloat32, p.has_key_lengths = true; })},
      {"Fp32Head256",
       With(square,
            [](Problem& p) { p.dtype = DType::kFloat32, p.head_size = p.value_head_size = 256; })},
      {"Fp32Mask", With(mask, [](Problem& p) { p.dtype = DType::kFloat32; })},
      {"Fp32Decode", With(Of(1, 4096), [](Problem& p) { p.dtype = DType::kFloat32; })},
      {"OddLengths", Of(1000, 777)},
      {"Causal", With(square, [](Problem& p) { p.causal = true; })},
      {"CausalWithPast",
       With(Of(512, 512), [](Problem& p) { p.causal = true, p.past_length = 1536; })},
      {"Fp32CausalWithPast",
       With(Of(512, 512),
            [](Problem& p) { p.dtype = DType::kFloat32, p.causal = true, p.past_length = 1536; })},
      {"CausalWithOddPast",
       With(Of(300, 300), [](Problem& p) { p.causal = true, p.past_length = 1001; })},
      {"WindowWithPast",
       With(Of(512, 512),
            [](Problem& p) { p.causal = true, p.left_window = 700, p.past_length = 1536; })},
      {"SoftcapCausalWithPast",
       With(Of(512, 512),
            [](Problem& p) { p.softcap = 30, p.causal = true, p.past_length = 1536; })},
      {"CausalMoreQueriesThanKeys", With(Of(1024, 512), [](Problem& p) { p.causal = true; })},
      {"CausalBottomRight",
       With(Of(1024, 512),
            [](Problem& p) { p.causal = true, p.alignment = Alignment::kBottomRight; })},
      {"CausalLengths",
       With(square, [](Problem& p) { p.causal = true, p.has_key_lengths = true; })},
      {"CausalOfLengths", With(square, CausalOfLengths)},
      {"WindowOfLengths", With(square,
                               [](Problem& p) {
                                 CausalOfLengths(p);
                                 p.left_window = 128;
                               })},
      {"WindowLeft", With(square, [](Problem& p) { p.left_window = 128; })},
      {"WindowRight", With(square, [](Problem& p) { p.right_window = 128; })},
      {"WindowBoth", With(square, [](Problem& p) { p.left_window = 128, p.right_window = 64; })},
      {"WindowMoreQueriesThanKeys", With(Of(1024, 512), [](Problem& p) { p.left_window = 128; })},
      {"CausalWindow", With(square, [](Problem& p) { p.causal = true, p.left_window = 128; })},
      {"Lengths", With(square, [](Problem& p) { p.has_key_lengths = true; })},
      {"HeadsAlike", With(square, [](Problem& p) { p.kv_heads = 32; })},
      {"OneKvHead", With(square, [](Problem& p) { p.kv_heads = 1; })},
      {"Head64", With(square, [](Problem& p) { p.head_size = p.value_head_size = 64; })},
      {"Head80And40", With(square, [](Problem& p) { p.head_size = 80, p.value_head_size = 40; })},
      {"Head1", With(square, [](Problem& p) { p.head_size = p.value_head_size = 1; })},
      {"Head192And128", With(square, [](Problem& p) { p.head_size = 192; })},
      {"Head256", With(square, [](Problem& p) { p.head_size = p.value_head_size = 256; })},
      {"BoolMask", mask},
      {"BoolMaskCausal", With(mask, [](Problem& p) { p.causal = true; })},
      {"BoolMaskWindow", With(mask, [](Problem& p) { p.left_window = 100; })},
      {"BoolMaskLengths", With(mask, [](Problem& p) { p.has_key_lengths = true; })},
      {"MaskOfEachHead", With(mask,
                              [](Problem& p) {
                                p.mask->dims = {2, 32, 1024, 1024};
                              })},
      {"MaskOfKeys", With(mask,
                          [](Problem& p) {
                            p.mask->dims = {2, 1, 1, 1024};
                          })},
      {"MaskOfKeysOfEachHead", With(mask,
                                    [](Problem& p) {
                                      p.mask->dims = {1, 32, 1, 1024};
                                    })},
      {"MaskOfFloat32", With(mask, [](Problem& p) { p.mask->dtype = DType::kFloat32; })},
      {"MaskOddLengths", With(Of(1001, 1001),
                              [](Problem& p) {
                                p.mask = MaskShape{DType::kBool, {1, 1, 1001, 1001}};
                              })},
      {"Softcap", With(square, [](Problem& p) { p.softcap = 30; })},
      {"SoftcapCausal", With(square, [](Problem& p) { p.softcap = 30, p.causal = true; })},
      {"SoftcapCausalWindow",
       With(square, [](Problem& p) { p.softcap = 30, p.causal = true, p.left_window = 128; })},
      {"SoftcapLengths",
       With(square, [](Problem& p) { p.softcap = 30, p.has_key_lengths = true; })},
      {"SoftcapCausalOfLengths", With(square,
                                      [](Problem& p) {
                                        CausalOfLengths(p);
                                        p.softcap = 30;
                                      })},
      {"SoftcapMask", With(mask, [](Problem& p) { p.softcap = 30; })},
      {"Decode", Of(1, 4096)},
      {"DecodeOneKey", Of(1, 1)},
      {"DecodeLengths", With(Of(1, 4096), [](Problem& p) { p.has_key_lengths = true; })},
      {"DecodeWindow", With(Of(1, 4096),
                            [](Problem& p) {
                              CausalOfLengths(p);
                              p.left_window = 100;
                            })},
      {"DecodeMask", With(Of(1, 4096),
                          [](Problem& p) {
                            p.mask = MaskShape{DType::kBool, {2, 32, 1, 4096}};
                          })},
      {"DecodeSoftcap", With(Of(1, 4096), [](Problem& p) { p.softcap = 30; })},
      {"FewQueries",
       With(Of(3, 4096),
            [](Problem& p) { p.causal = true, p.alignment = Alignment::kBottomRight; })},
      {"SampleTiny", samples.tiny},
      {"SampleWindowed", samples.windowed},
      {"SampleFull", samples.full},
      {"SampleFullFp32", samples.full_fp32},
      {"LongPrefill", With(Of(32768, 32768), [](Problem& p) { p.batch = 1, p.causal = true; })},
  };
}

class CudnnSupportsTest : public ::testing::TestWithParam<Case> {};

TEST_P(CudnnSupportsTest, WhatSupportsAccepts) {
  const Problem& p = GetParam().problem;
  ASSERT_TRUE(Validate(p).ok());
  ASSERT_TRUE(Supports(p).ok()) << Supports(p);
  const SdpaGraph graph = GraphOf(p);
  const absl::StatusOr<CompiledPlan> plan = Cudnn().Compile(graph, Properties());
  ASSERT_TRUE(plan.ok()) << graph.Key() << "\n" << plan.status();
  EXPECT_GT(plan->bytes.size(), 10'000u) << "it contains kernels";
  // No score matrix: only small buffers for scheduling or for partial results of split keys.
  EXPECT_LE(plan->workspace_bytes, 1 << 20) << graph.Key();
}

INSTANTIATE_TEST_SUITE_P(, CudnnSupportsTest, ::testing::ValuesIn(Cases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Batch rows of different lengths without padding.
std::vector<Case> RaggedCases() {
  const Problem square = Of(1024, 1024);
  return {
      {"Bf16", square},
      {"Fp16", With(square, [](Problem& p) { p.dtype = DType::kFloat16; })},
      {"Fp32", With(square, [](Problem& p) { p.dtype = DType::kFloat32; })},
      {"Causal", With(square, [](Problem& p) { p.causal = true; })},
      {"Fp32Causal", With(square, [](Problem& p) { p.dtype = DType::kFloat32, p.causal = true; })},
      {"CausalWithPast",
       With(Of(512, 512), [](Problem& p) { p.causal = true, p.past_length = 1536; })},
      {"CausalLengths",
       With(square, [](Problem& p) { p.causal = true, p.has_key_lengths = true; })},
      {"CausalOfLengths", With(square, CausalOfLengths)},
      {"CausalBottomRightMoreQueriesThanKeys",
       With(Of(1024, 512),
            [](Problem& p) { p.causal = true, p.alignment = Alignment::kBottomRight; })},
      {"WindowBoth", With(square, [](Problem& p) { p.left_window = 128, p.right_window = 64; })},
      {"WindowMoreQueriesThanKeys", With(Of(1024, 512), [](Problem& p) { p.left_window = 128; })},
      {"HeadsAlike", With(square, [](Problem& p) { p.kv_heads = 32; })},
      {"Head64", With(square, [](Problem& p) { p.head_size = p.value_head_size = 64; })},
      {"Head80And40", With(square, [](Problem& p) { p.head_size = 80, p.value_head_size = 40; })},
      {"Head256", With(square, [](Problem& p) { p.head_size = p.value_head_size = 256; })},
      {"Decode", Of(1, 4096)},
      {"Fp32Decode", With(Of(1, 4096), [](Problem& p) { p.dtype = DType::kFloat32; })},
      {"DecodeHead256",
       With(Of(1, 4096), [](Problem& p) { p.head_size = p.value_head_size = 256; })},
  };
}

class CudnnSupportsRaggedTest : public ::testing::TestWithParam<Case> {};

TEST_P(CudnnSupportsRaggedTest, WhatMayBeRaggedAllows) {
  const Problem& p = GetParam().problem;
  ASSERT_TRUE(Validate(p).ok());
  ASSERT_TRUE(MayBeRagged(GraphOf(p)));
  const SdpaGraph graph = RaggedOf(GraphOf(p), 16, p.query_length, p.total_keys());
  const absl::StatusOr<CompiledPlan> plan = Cudnn().Compile(graph, Properties());
  ASSERT_TRUE(plan.ok()) << graph.Key() << "\n" << plan.status();
  EXPECT_LE(plan->workspace_bytes, 1 << 20) << graph.Key();
  // The kernel's name contains the tile's queries, keys and head size, and so bounds what it reads
  // beyond the last key.
  const std::string text(plan->bytes.begin(), plan->bytes.end());
  std::smatch tile;
  ASSERT_TRUE(std::regex_search(text, tile, std::regex("_sdpa_sm\\d+_\\w+_knob_\\d+_\\d+x(\\d+)x")))
      << graph.Key();
  EXPECT_LE(std::stoi(tile[1]), kTileKeys) << tile[0];
}

INSTANTIATE_TEST_SUITE_P(, CudnnSupportsRaggedTest, ::testing::ValuesIn(RaggedCases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Calls over pages.
struct PagedCase {
  const char* name;
  RaggedCall call;
  PagedSizes sizes;
};

void PrintTo(const PagedCase& c, std::ostream* out) { *out << c.name; }

constexpr GraphPages kPages = {.rows = 64, .count = 1000};

RaggedCall PagedCall(DType dtype, int64_t kv_heads = 8, int64_t head_size = 128,
                     int64_t value_head_size = 128) {
  return {.dtype = dtype,
          .query_heads = 32,
          .kv_heads = kv_heads,
          .head_size = head_size,
          .value_head_size = value_head_size};
}

std::vector<PagedCase> PagedCases() {
  const RaggedCall bf16 = PagedCall(DType::kBFloat16);
  const RaggedCall fp16 = PagedCall(DType::kFloat16);
  const RaggedCall fp32 = PagedCall(DType::kFloat32);
  const auto shaped = [](int64_t kv_heads, int64_t head_size, int64_t value_head_size) {
    return PagedCall(DType::kBFloat16, kv_heads, head_size, value_head_size);
  };
  const PagedSizes steps = {.items = 16, .rows = 1, .tokens = 4096};
  const PagedSizes chunk = {.items = 1, .rows = 2048, .tokens = 4096};
  return {
      {"Steps", bf16, steps},
      {"StepsFp16", fp16, steps},
      {"StepsFp32", fp32, steps},
      {"StepsWindow", bf16, {16, 1, 4096, 1000}},
      {"StepsWindowFp32", fp32, {16, 1, 4096, 1000}},
      {"OneStep", bf16, {1, 1, 4096}},
      {"ManySteps", bf16, {1024, 1, 4096}},
      {"LongSteps", bf16, {16, 1, 1 << 20}},
      {"ShortSteps", bf16, {16, 1, 1}},
      {"Chunk", bf16, chunk},
      {"ChunkFp32", fp32, chunk},
      {"ChunkWindow", bf16, {1, 2048, 4096, 1000}},
      {"FewRows", bf16, {64, 4, 4096}},
      {"MoreRowsThanTokens", bf16, {4, 500, 100}},
      {"MoreRowsThanTokensWindow", bf16, {4, 500, 100, 30}},
      {"HeadsAlike", shaped(32, 128, 128), steps},
      {"OneKvHead", shaped(1, 128, 128), steps},
      {"OneKvHeadChunk", shaped(1, 128, 128), chunk},
      {"Head8", shaped(8, 8, 8), steps},
      {"Head64", shaped(8, 64, 64), steps},
      {"Head80And40", shaped(8, 80, 40), steps},
      {"Head192And128", shaped(8, 192, 128), steps},
      {"Head256", shaped(8, 256, 256), steps},
      {"Head256Chunk", shaped(8, 256, 256), chunk},
  };
}

class CudnnSupportsPagesTest : public ::testing::TestWithParam<PagedCase> {};

TEST_P(CudnnSupportsPagesTest, WhatSupportsAccepts) {
  const auto& [name, call, sizes] = GetParam();
  ASSERT_TRUE(Supports(call, kPages.rows).ok());
  const SdpaGraph graph = PagedGraphOf(call, kPages, sizes);
  const absl::StatusOr<CompiledPlan> plan = Cudnn().Compile(graph, Properties());
  ASSERT_TRUE(plan.ok()) << graph.Key() << "\n" << plan.status();
  EXPECT_GT(plan->bytes.size(), 10'000u) << "it contains kernels";
  // No copy of the keys: only partial results of split keys.
  EXPECT_LE(plan->workspace_bytes, 16 << 20) << graph.Key();
}

INSTANTIATE_TEST_SUITE_P(, CudnnSupportsPagesTest, ::testing::ValuesIn(PagedCases()),
                         [](const auto& info) { return std::string(info.param.name); });

TEST(CudnnRejectsPagesTest, WhoseSizeIsNoPowerOfTwo) {
  const RaggedCall call = PagedCall(DType::kBFloat16);
  SdpaGraph graph = PagedGraphOf(call, kPages, {.items = 16, .rows = 1, .tokens = 4096});
  graph.pages->rows = 48;
  const absl::StatusOr<CompiledPlan> plan = Cudnn().Compile(graph, Properties());
  ASSERT_FALSE(plan.ok());
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("block size"));
  EXPECT_FALSE(Supports(call, 48).ok());
}

Problem Gradients(
    Problem problem, void (*change)(Problem&) = [](Problem&) {}) {
  problem.backward = Backward{.has_forward = true};
  for (const Role role : {Role::kDQ, Role::kDK, Role::kDV}) problem.backward->gradients.Add(role);
  change(problem);
  return problem;
}

std::vector<Case> BackwardCases() {
  const Problem square = Of(1024, 1024);
  const Problem mask = With(square, [](Problem& p) {
    p.mask = MaskShape{DType::kBool, {1, 1, 1024, 1024}};
  });
  return {
      {"Bf16", Gradients(square)},
      {"Fp16", Gradients(square, [](Problem& p) { p.dtype = DType::kFloat16; })},
      {"OddLengths", Gradients(Of(1000, 777))},
      {"Causal", Gradients(square, [](Problem& p) { p.causal = true; })},
      {"CausalWithPast",
       Gradients(Of(512, 512), [](Problem& p) { p.causal = true, p.past_length = 512; })},
      {"CausalMoreQueriesThanKeys", Gradients(Of(1024, 512), [](Problem& p) { p.causal = true; })},
      {"CausalLengths",
       Gradients(square, [](Problem& p) { p.causal = true, p.has_key_lengths = true; })},
      {"CausalOfLengths", Gradients(square, CausalOfLengths)},
      {"WindowBoth",
       Gradients(square, [](Problem& p) { p.left_window = 128, p.right_window = 64; })},
      {"CausalWindow", Gradients(square, [](Problem& p) { p.causal = true, p.left_window = 128; })},
      {"WindowOfLengths", Gradients(square,
                                    [](Problem& p) {
                                      CausalOfLengths(p);
                                      p.left_window = 128;
                                    })},
      {"Lengths", Gradients(square, [](Problem& p) { p.has_key_lengths = true; })},
      {"HeadsAlike", Gradients(square, [](Problem& p) { p.kv_heads = 32; })},
      {"OneKvHead", Gradients(square, [](Problem& p) { p.kv_heads = 1; })},
      {"Head64", Gradients(square, [](Problem& p) { p.head_size = p.value_head_size = 64; })},
      {"Head80And40",
       Gradients(square, [](Problem& p) { p.head_size = 80, p.value_head_size = 40; })},
      {"Head1", Gradients(square, [](Problem& p) { p.head_size = p.value_head_size = 1; })},
      {"Head192And128", Gradients(square, [](Problem& p) { p.head_size = 192; })},
      {"Head256",
       Gradients(square, [](Problem& p) { p.batch = 1, p.head_size = p.value_head_size = 256; })},
      {"OneQuery", Gradients(Of(1, 1024))},
      {"OneQueryAndKey", Gradients(Of(1, 1))},
      {"BoolMask", Gradients(mask)},
      {"BoolMaskCausal", Gradients(mask, [](Problem& p) { p.causal = true; })},
      {"BoolMaskLengths", Gradients(mask, [](Problem& p) { p.has_key_lengths = true; })},
      {"MaskOfKeys", Gradients(mask,
                               [](Problem& p) {
                                 p.mask->dims = {2, 1, 1, 1024};
                               })},
      {"MaskOfFloat32", Gradients(mask, [](Problem& p) { p.mask->dtype = DType::kFloat32; })},
      {"Long",
       Gradients(Of(8192, 8192), [](Problem& p) { p.batch = p.query_heads = p.kv_heads = 1; })},
  };
}

class CudnnBackwardGraphTest : public ::testing::TestWithParam<Case> {};

TEST_P(CudnnBackwardGraphTest, Compiles) {
  const Problem& p = GetParam().problem;
  ASSERT_TRUE(Validate(p).ok()) << Validate(p);
  ASSERT_TRUE(Supports(p).ok()) << Supports(p);
  const SdpaGraph graph = GraphOf(p);
  const absl::StatusOr<CompiledPlan> plan = Cudnn().Compile(graph, Properties());
  ASSERT_TRUE(plan.ok()) << graph.Key() << "\n" << plan.status();
  EXPECT_GT(plan->bytes.size(), 10'000u) << "it contains kernels";
  EXPECT_LE(plan->workspace_bytes, BackwardWorkspaceBytes(graph)) << graph.Key();
}

INSTANTIATE_TEST_SUITE_P(, CudnnBackwardGraphTest, ::testing::ValuesIn(BackwardCases()),
                         [](const auto& info) { return std::string(info.param.name); });

// Graphs that GraphOf() never returns, and cuDNN's reason for rejecting them.
struct RejectedGraph {
  const char* name;
  void (*change)(SdpaGraph&);
  const char* words;
};

void PrintTo(const RejectedGraph& r, std::ostream* out) { *out << r.name; }

class CudnnRejectsTest : public ::testing::TestWithParam<RejectedGraph> {};

TEST_P(CudnnRejectsTest, WhatGraphsAvoid) {
  SdpaGraph graph = GraphOf(Of(1024, 512));
  GetParam().change(graph);
  const absl::StatusOr<CompiledPlan> plan = Cudnn().Compile(graph, Properties());
  ASSERT_FALSE(plan.ok()) << graph.Key();
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr(GetParam().words)) << graph.Key();
}

INSTANTIATE_TEST_SUITE_P(
    , CudnnRejectsTest,
    ::testing::Values(
        RejectedGraph{"HeadSizesThatAreNotAMultipleOfEight",
                      [](SdpaGraph& g) { g.head_size = 100; }, "multiple of 8"},
        RejectedGraph{"BottomRightWithMoreQueriesThanKeys",
                      [](SdpaGraph& g) { g.bottom_right = true, g.right_bound = 0; },
                      "does not support max_s_q > max_s_kv"},
        RejectedGraph{"BottomRightWithABias",
                      [](SdpaGraph& g) {
                        g.bottom_right = true, g.right_bound = 0, g.has_lengths = true;
                        g.bias = MaskShape{DType::kBFloat16, {1, 1, 1024, 512}};
                      },
                      "is_bias=False"},
        RejectedGraph{"ANegativeRightBound", [](SdpaGraph& g) { g.right_bound = -1; },
                      "larger than or equal to zero"},
        RejectedGraph{"AWindowOverFewerKeysThanQueries", [](SdpaGraph& g) { g.left_bound = 100; },
                      "max_s_q <= max_s_kv"},
        RejectedGraph{"RaggedTensorsWithoutLengths",
                      [](SdpaGraph& g) { g.ragged = true, g.has_lengths = false; },
                      "only supported with padding mask"},
        RejectedGraph{"HeadsThatDoNotDivide", [](SdpaGraph& g) { g.kv_heads = 5; }, "group-query"}),
    [](const auto& info) { return std::string(info.param.name); });

TEST(CudnnLibraryTest, ReportsItsVersion) { EXPECT_GE(Cudnn().version(), 91900); }

TEST(CudnnLibraryTest, ReportsAnInvalidDescription) {
  const absl::StatusOr<CompiledPlan> plan = Cudnn().Compile(GraphOf(Of(128, 128)), "{}");
  EXPECT_EQ(plan.status().code(), absl::StatusCode::kInternal);
  EXPECT_THAT(std::string(plan.status().message()), HasSubstr("maxGridSize"));
}

}  // namespace
}  // namespace rapt::cudnn
