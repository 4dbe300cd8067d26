// Compares every backend, on every available instruction set and in every type, with the oracle,
// feature by feature.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <functional>
#include <iostream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "absl/strings/str_join.h"
#include "attention/backend.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat64};

TEST(TargetsTest, CpuAndReferenceRunOnEveryMachine) {
  std::cout << "runs here:";
  for (const Target& target : Targets()) std::cout << " " << target.Name();
  std::cout << "\nthis machine lacks:";
  for (const std::string& target : MissingTargets()) std::cout << " " << target;
  std::cout << std::endl;
  std::vector<std::string> backends;
  for (const Target& target : Targets()) backends.push_back(target.backend);
  EXPECT_THAT(backends, ::testing::IsSupersetOf({"cpu", "reference"}));
  EXPECT_EQ(backends.back(), "reference");
}

// A row of the table: a problem, the memory layout of its tensors, and the number of threads.
struct Case {
  std::string name;
  Problem problem;
  Arrangement arrangement = {};
  int threads = 1;
  double magnitude = 2;
};

Problem Base() {
  return {.batch = 2,
          .query_heads = 4,
          .kv_heads = 2,
          .query_length = 17,
          .key_length = 65,
          .head_size = 32,
          .value_head_size = 24,
          .wants_lse = true};
}

Problem With(const std::function<void(Problem&)>& change) {
  Problem problem = Base();
  change(problem);
  return problem;
}

std::vector<Case> Sizes() {
  constexpr int64_t kSizes[][4] = {
      {1, 1, 1, 1},       {3, 17, 1, 3},      {17, 3, 3, 1},      {17, 17, 17, 17},
      {63, 65, 63, 65},   {65, 63, 65, 63},   {127, 129, 3, 17},  {129, 127, 17, 127},
      {64, 64, 64, 64},   {255, 17, 63, 255}, {257, 1, 65, 257},  {1, 257, 127, 129},
      {3, 255, 255, 257}, {257, 255, 17, 3},  {255, 257, 64, 64}, {65, 129, 257, 63},
      {128, 256, 16, 16}, {97, 513, 8, 8},    {17, 1025, 64, 64}};
  std::vector<Case> cases;
  for (const auto& [queries, keys, head_size, value_head_size] : kSizes) {
    cases.push_back({"q" + std::to_string(queries) + "_k" + std::to_string(keys) + "_d" +
                         std::to_string(head_size) + "_dv" + std::to_string(value_head_size),
                     {.batch = 1,
                      .query_heads = 1,
                      .kv_heads = 1,
                      .query_length = queries,
                      .key_length = keys,
                      .head_size = head_size,
                      .value_head_size = value_head_size,
                      .wants_lse = true},
                     {},
                     static_cast<int>(1 + cases.size() % 2)});
  }
  return cases;
}

std::vector<Case> HeadSizes() {
  std::vector<Case> cases;
  for (const int64_t size : {32, 64, 80, 96, 128, 192, 256}) {
    cases.push_back({"head_size_" + std::to_string(size), With([&](Problem& p) {
                       p.batch = 1;
                       p.query_length = 33;
                       p.key_length = 130;
                       p.head_size = p.value_head_size = size;
                       p.causal = true;
                       p.alignment = Alignment::kBottomRight;
                     })});
  }
  return cases;
}

std::vector<Case> HeadCounts() {
  constexpr int64_t kCounts[][2] = {{8, 8}, {8, 2}, {8, 1}, {6, 3}, {5, 1}};
  std::vector<Case> cases;
  for (const auto& [query_heads, kv_heads] : kCounts) {
    const auto heads = [&, q = query_heads, kv = kv_heads](Problem& p) {
      p.query_heads = q;
      p.kv_heads = kv;
    };
    const std::string name = std::to_string(query_heads) + "_over_" + std::to_string(kv_heads);
    cases.push_back({"heads_" + name, With(heads), {}, 2});
    cases.push_back({"decode_heads_" + name, With([&](Problem& p) {
                       heads(p);
                       p.query_length = 1;
                       p.past_length = 63;
                       p.key_length = 1;
                       p.wants_present = true;
                     })});
  }
  return cases;
}

std::vector<Case> Masks() {
  constexpr std::array<int64_t, 4> kShapes[] = {
      {1, 1, 1, 1},  {1, 1, 1, 65}, {1, 1, 17, 65}, {1, 4, 17, 65}, {2, 1, 17, 65}, {2, 4, 17, 65},
      {2, 1, 1, 65}, {2, 4, 17, 1}, {1, 4, 1, 1},   {1, 1, 17, 60}, {2, 4, 17, 3}};
  std::vector<Case> cases;
  for (const std::array<int64_t, 4>& dims : kShapes) {
    const std::string shape = absl::StrJoin(dims, "x");
    for (const DType type : {DType::kBool, DType::kFloat32}) {
      cases.push_back({"mask_" + std::string(NameOf(type)) + "_" + shape, With([&](Problem& p) {
                         p.mask = MaskShape{type, dims};
                       })});
    }
  }
  for (const DType type : {DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    cases.push_back({"mask_" + std::string(NameOf(type)), With([&](Problem& p) {
                       p.mask = MaskShape{type, {2, 1, 17, 65}};
                     })});
  }
  cases.push_back({"mask_and_causal", With([](Problem& p) {
                     p.mask = MaskShape{DType::kBool, {1, 1, 17, 65}};
                     p.causal = true;
                   })});
  return cases;
}

// Every way to hide keys by position, with more, fewer and as many queries as keys.
std::vector<Case> Positions() {
  struct Limit {
    const char* name;
    bool causal;
    int64_t left, right;
  };
  constexpr Limit kLimits[] = {{"causal", true, -1, -1},       {"left_0", false, 0, -1},
                               {"right_0", false, -1, 0},      {"window_5_3", false, 5, 3},
                               {"causal_7", true, 7, -1},      {"window_0_0", false, 0, 0},
                               {"window_70_70", false, 70, 70}};
  constexpr int64_t kLengths[][2] = {{33, 33}, {65, 17}, {17, 140}};
  constexpr std::pair<Alignment, const char*> kAlignments[] = {{Alignment::kTopLeft, "_top"},
                                                               {Alignment::kBottomRight, "_bottom"},
                                                               {Alignment::kOnnx, "_onnx"}};
  std::vector<Case> cases;
  for (const Limit& limit : kLimits) {
    for (const auto& [queries, keys] : kLengths) {
      for (const auto& [alignment, name] : kAlignments) {
        for (const char* extra : {"", "_past", "_lengths"}) {
          const std::string suffix = extra;
          // The same as top-left without lengths.
          if (alignment == Alignment::kOnnx && suffix != "_lengths") continue;
          cases.push_back({std::string(limit.name) + "_q" + std::to_string(queries) + "_k" +
                               std::to_string(keys) + name + suffix,
                           With([&, q = queries, k = keys, a = alignment](Problem& p) {
                             p.query_length = q;
                             p.key_length = k;
                             p.head_size = p.value_head_size = 8;
                             p.causal = limit.causal;
                             p.left_window = limit.left;
                             p.right_window = limit.right;
                             p.alignment = a;
                             p.past_length = suffix == "_past" ? 19 : 0;
                             p.has_key_lengths = suffix == "_lengths";
                           })});
        }
      }
    }
  }
  return cases;
}

std::vector<Case> Scores() {
  const auto everything = [](Problem& p) {
    p.softcap = 1.5;
    p.causal = true;
    p.past_length = 5;
    p.mask = MaskShape{DType::kFloat32, {2, 1, 17, 70}};
  };
  std::vector<Case> cases;
  for (const ScoreOutput output : {ScoreOutput::kScores, ScoreOutput::kSoftcapped,
                                   ScoreOutput::kBiased, ScoreOutput::kWeights}) {
    const std::string mode = std::to_string(static_cast<int>(output));
    cases.push_back({"scores_" + mode, With([&](Problem& p) { p.score_output = output; })});
    cases.push_back({"scores_" + mode + "_of_everything", With([&](Problem& p) {
                       everything(p);
                       p.score_output = output;
                     })});
    cases.push_back({"scores_" + mode + "_of_decode", With([&](Problem& p) {
                       p.query_length = 1;
                       p.key_length = 130;
                       p.has_key_lengths = true;
                       p.score_output = output;
                     })});
  }
  for (const double probability : {0.0, 0.1, 0.5, 0.999}) {
    cases.push_back(
        {"dropout_" + std::to_string(static_cast<int>(probability * 1000)), With([&](Problem& p) {
           everything(p);
           p.dropout = Dropout{probability, 0x123456789ABCDEF0};
           p.score_output = ScoreOutput::kWeights;
         })});
  }
  cases.push_back({"dropout_without_weights", With([](Problem& p) {
                     p.key_length = 131;
                     p.dropout = Dropout{0.25, 42};
                   })});
  return cases;
}

std::vector<Case> Scaling() {
  return {
      {"scale", With([](Problem& p) { p.scale = 0.37; })},
      {"scale_negative", With([](Problem& p) { p.scale = -0.25; })},
      {"scale_zero", With([](Problem& p) { p.scale = 0; })},
      {"scale_one", With([](Problem& p) { p.scale = 1; })},
      {"softcap", With([](Problem& p) { p.softcap = 0.7; })},
      {"softcap_and_scale", With([](Problem& p) {
         p.softcap = 30;
         p.scale = 1;
       })},
      {"softmax_in_fp64", With([](Problem& p) {
         p.softmax_in_fp64 = true;
         p.score_output = ScoreOutput::kWeights;
       })},
      // Scores of a few hundred: rounding them, or a scaled Q, to a half type causes large errors.
      {"large_scores", With([](Problem& p) { p.head_size = 80; }), {}, 1, 10},
      {"large_softcapped_scores",
       With([](Problem& p) {
         p.head_size = 80;
         p.softcap = 50;
       }),
       {},
       1,
       10},
  };
}

std::vector<Case> Layouts() {
  struct Named {
    const char* name;
    Arrangement arrangement;
  };
  // In the order of Arrangement: Q, K and V, past, mask, output.
  const Named kArrangements[] = {
      {"bshd",
       {Storage::kBshd, Storage::kBshd, Storage::kRowMajor, Storage::kRowMajor, Storage::kBshd}},
      {"position_first",
       {Storage::kPositionFirst, Storage::kPositionFirst, Storage::kPositionFirst,
        Storage::kTransposed, Storage::kPositionFirst}},
      {"padded_rows",
       {Storage::kPaddedRows, Storage::kPaddedRows, Storage::kBshd, Storage::kPaddedRows,
        Storage::kPaddedRows}},
      {"misaligned",
       {Storage::kMisaligned, Storage::kMisaligned, Storage::kMisaligned, Storage::kMisaligned,
        Storage::kMisaligned}},
      {"broadcast",
       {Storage::kBroadcastHeads, Storage::kBroadcastBatch, Storage::kPaddedRows,
        Storage::kElementsApart, Storage::kRowMajor}},
      {"broadcast_heads",
       {Storage::kRowMajor, Storage::kBroadcastHeads, Storage::kBroadcastBatch,
        Storage::kBroadcastBatch, Storage::kMisaligned}},
  };
  std::vector<Case> cases;
  for (const Named& named : kArrangements) {
    for (const DType mask : {DType::kBool, DType::kFloat16, DType::kFloat32}) {
      cases.push_back({std::string("layout_") + named.name + "_mask_" + std::string(NameOf(mask)),
                       With([&](Problem& p) {
                         p.past_length = 4;
                         p.wants_present = true;
                         p.score_output = ScoreOutput::kWeights;
                         p.mask = MaskShape{mask, {2, 4, 17, 69}};
                       }),
                       named.arrangement, 2});
    }
  }
  return cases;
}

std::vector<Case> Threads() {
  std::vector<Case> cases;
  for (const int threads : {1, 2, 5}) {
    const std::string suffix = "_on_" + std::to_string(threads);
    cases.push_back({"prefill" + suffix,
                     With([](Problem& p) {
                       p.query_length = 130;
                       p.key_length = 150;
                       p.causal = true;
                       p.score_output = ScoreOutput::kBiased;
                     }),
                     {},
                     threads});
    cases.push_back({"decode_4096" + suffix,
                     With([](Problem& p) {
                       p.batch = 1;
                       p.query_heads = p.kv_heads = 1;
                       p.query_length = 1;
                       p.key_length = 4096;
                       p.head_size = p.value_head_size = 64;
                       p.score_output = ScoreOutput::kWeights;
                     }),
                     {},
                     threads});
    cases.push_back({"decode_grouped" + suffix,
                     With([](Problem& p) {
                       p.query_heads = 8;
                       p.query_length = 1;
                       p.past_length = 1500;
                       p.key_length = 7;
                       p.causal = true;
                       p.left_window = 1200;
                       p.wants_present = true;
                     }),
                     {},
                     threads});
    cases.push_back({"decode_lengths" + suffix,
                     With([](Problem& p) {
                       p.batch = 3;
                       p.query_length = 1;
                       p.key_length = 777;
                       p.causal = true;
                       p.alignment = Alignment::kBottomRight;
                       p.has_key_lengths = true;
                     }),
                     {},
                     threads});
    cases.push_back({"few_queries_many_keys" + suffix,
                     With([](Problem& p) {
                       p.batch = 1;
                       p.query_heads = p.kv_heads = 1;
                       p.query_length = 3;
                       p.key_length = 2050;
                       p.mask = MaskShape{DType::kBool, {1, 1, 1, 2050}};
                       p.softcap = 3;
                     }),
                     {},
                     threads});
  }
  return cases;
}

// Few rows and many keys on several threads: a backend may split the keys and merge the parts.
std::vector<Case> Splits() {
  const auto split = [](const std::function<void(Problem&)>& change) {
    return With([&](Problem& p) {
      p.batch = p.kv_heads = 1;
      p.query_heads = 2;
      p.query_length = 1;
      p.key_length = 4100;
      p.head_size = p.value_head_size = 16;
      change(p);
    });
  };
  std::vector<Case> cases = {
      {"split", split([](Problem&) {})},
      {"split_three_queries", split([](Problem& p) {
         p.query_length = 3;
         p.causal = true;
         p.alignment = Alignment::kBottomRight;
       })},
      {"split_past", split([](Problem& p) {
         p.past_length = 1500;
         p.causal = true;
         p.wants_present = true;
       })},
      {"split_biased_scores", split([](Problem& p) {
         p.softcap = 2;
         p.mask = MaskShape{DType::kFloat32, {1, 1, 1, 4100}};
         p.score_output = ScoreOutput::kBiased;
       })},
      {"split_raw_scores", split([](Problem& p) {
         p.score_output = ScoreOutput::kScores;
         p.left_window = 5;
         p.alignment = Alignment::kBottomRight;
       })},
      {"split_weights", split([](Problem& p) { p.score_output = ScoreOutput::kWeights; })},
      {"split_window_within_a_part", split([](Problem& p) {
         p.left_window = 100;
         p.right_window = 0;
         p.alignment = Alignment::kBottomRight;
       })},
      {"split_short_mask", split([](Problem& p) {
         p.mask = MaskShape{DType::kBool, {1, 2, 1, 1100}};
       })},
      {"split_one_visible_key", split([](Problem& p) { p.causal = true; })},
      {"split_lengths", split([](Problem& p) {
         p.batch = 2;
         p.has_key_lengths = true;
       })},
      {"split_dropout", split([](Problem& p) {
         p.dropout = Dropout{0.4, 8};
       })},
      {"split_in_fp64", split([](Problem& p) { p.softmax_in_fp64 = true; })},
  };
  for (Case& c : cases) c.threads = 5;
  cases.push_back(
      {"split_bshd",
       split([](Problem& p) { p.batch = 2; }),
       {.query = Storage::kBshd, .key_value = Storage::kBshd, .output = Storage::kMisaligned},
       5});
  return cases;
}

std::vector<Case> Biases() {
  const auto bias = [](const MaskShape& shape, const std::function<void(Problem&)>& change) {
    return With([&](Problem& p) {
      p.bias = shape;
      change(p);
    });
  };
  const MaskShape rows = {DType::kFloat32, {1, 1, 17, 65}};
  return {
      {"bias", bias(rows, [](Problem&) {})},
      {"bias_of_bf16", bias({DType::kBFloat16, {2, 1, 1, 65}}, [](Problem&) {})},
      {"bias_of_fp64", bias({DType::kFloat64, {1, 1, 17, 1}}, [](Problem&) {})},
      {"bias_shorter_than_the_keys", bias({DType::kFloat16, {1, 1, 17, 60}}, [](Problem&) {})},
      {"bias_with_a_bool_mask", bias(rows,
                                     [](Problem& p) {
                                       p.mask = MaskShape{DType::kBool, {2, 1, 1, 65}};
                                       p.score_output = ScoreOutput::kBiased;
                                     })},
      {"bias_with_a_shorter_float_mask", bias(rows,
                                              [](Problem& p) {
                                                p.mask = MaskShape{DType::kFloat32, {1, 1, 17, 40}};
                                                p.score_output = ScoreOutput::kWeights;
                                              })},
      {"bias_with_a_past_and_everything", bias({DType::kFloat32, {2, 1, 17, 70}},
                                               [](Problem& p) {
                                                 p.past_length = 5;
                                                 p.softcap = 1.5;
                                                 p.causal = true;
                                                 p.head_sink = DType::kFloat32;
                                                 p.dropout = Dropout{0.25, 42};
                                                 p.wants_present = true;
                                               })},
      {"bias_of_split_keys",
       bias({DType::kFloat32, {1, 1, 1, 4100}},
            [](Problem& p) {
              p.query_length = 1;
              p.key_length = 4100;
              p.has_key_lengths = true;
            }),
       {},
       16},
  };
}

std::vector<Case> Sinks() {
  const auto sink = [](const std::function<void(Problem&)>& change) {
    return With([&](Problem& p) {
      p.head_sink = DType::kFloat32;
      change(p);
    });
  };
  return {
      {"sink", sink([](Problem&) {})},
      {"sink_and_everything", sink([](Problem& p) {
         p.softcap = 1.5;
         p.scale = 0.7;
         p.causal = true;
         p.past_length = 5;
         p.mask = MaskShape{DType::kFloat32, {2, 1, 17, 70}};
         p.dropout = Dropout{0.25, 42};
       })},
      {"sink_weights", sink([](Problem& p) { p.score_output = ScoreOutput::kWeights; })},
      {"sink_biased", sink([](Problem& p) { p.score_output = ScoreOutput::kBiased; })},
      {"sink_in_fp64", sink([](Problem& p) { p.softmax_in_fp64 = true; })},
      {"sink_lengths", sink([](Problem& p) { p.has_key_lengths = true; })},
      {"sink_of_rows_without_keys", sink([](Problem& p) {
         p.key_length = 9;
         p.causal = true;
         p.alignment = Alignment::kBottomRight;
         p.score_output = ScoreOutput::kWeights;
       })},
      {"sink_without_keys", sink([](Problem& p) { p.key_length = 0; })},
      {"sink_of_decode", sink([](Problem& p) { p.query_length = 1; })},
      {"sink_of_split_keys",
       sink([](Problem& p) {
         p.query_length = 1;
         p.key_length = 4100;
         p.has_key_lengths = true;
       }),
       {},
       16},
  };
}

std::vector<Case> Others() {
  return {
      {"present", With([](Problem& p) {
         p.past_length = 9;
         p.wants_present = true;
       })},
      {"present_without_past", With([](Problem& p) { p.wants_present = true; })},
      {"present_in_several_tasks", With([](Problem& p) {
         p.query_length = 2;
         p.past_length = 300;
         p.key_length = 211;
         p.head_size = 500;
         p.value_head_size = 700;
         p.wants_present = true;
       })},
      {"only_past", With([](Problem& p) {
         p.past_length = 70;
         p.key_length = 0;
         p.wants_present = true;
       })},
      {"past_and_lengths", With([](Problem& p) {
         p.past_length = 7;
         p.has_key_lengths = true;
       })},
      {"lengths", With([](Problem& p) { p.has_key_lengths = true; })},
      {"without_lse", With([](Problem& p) { p.wants_lse = false; })},
      {"many_small",
       With([](Problem& p) {
         p.batch = 7;
         p.query_length = p.key_length = 5;
       }),
       {},
       5},
  };
}

using CaseAndType = std::tuple<Case, DType>;

void PrintTo(const Case& c, std::ostream* out) { *out << c.name; }

class ConformanceTest : public ::testing::TestWithParam<CaseAndType> {};

TEST_P(ConformanceTest, MatchesTheOracle) {
  const auto& [c, dtype] = GetParam();
  Problem problem = c.problem;
  problem.dtype = dtype;
  constexpr uint64_t kSeed = 20240601;
  SCOPED_TRACE("seed " + std::to_string(kSeed));
  Rng rng(kSeed);
  const Inputs inputs = RandomInputs(problem, rng, c.arrangement, c.magnitude);
  ExpectConforms(problem, inputs, c.threads, c.arrangement.output);
}

std::string NameOfCase(const ::testing::TestParamInfo<CaseAndType>& info) {
  const auto& [c, dtype] = info.param;
  return c.name + "_" + std::string(NameOf(dtype));
}

#define INSTANTIATE(Group)                                                                \
  INSTANTIATE_TEST_SUITE_P(                                                               \
      Group, ConformanceTest,                                                             \
      ::testing::Combine(::testing::ValuesIn(Group()), ::testing::ValuesIn(kFloatTypes)), \
      NameOfCase)

INSTANTIATE(Sizes);
INSTANTIATE(HeadSizes);
INSTANTIATE(HeadCounts);
INSTANTIATE(Masks);
INSTANTIATE(Positions);
INSTANTIATE(Scores);
INSTANTIATE(Scaling);
INSTANTIATE(Layouts);
INSTANTIATE(Threads);
INSTANTIATE(Splits);
INSTANTIATE(Biases);
INSTANTIATE(Sinks);
INSTANTIATE(Others);

// X = [[1,0,1,0],[0,1,0,1],[1,1,0,0]] attends to itself, computed by hand to four decimals.
class HandComputedExampleTest : public ::testing::TestWithParam<DType> {};

TEST_P(HandComputedExampleTest, ToFourDecimals) {
  constexpr double kX[3][4] = {{1, 0, 1, 0}, {0, 1, 0, 1}, {1, 1, 0, 0}};
  // Scores are 1, 1/2 and 0: exp(1), exp(1/2) and 1 over their sums, 5.3670 and 6.0157.
  const std::vector<double> weights = {.5065, .1863, .3072, .1863, .5065,
                                       .3072, .2741, .2741, .4519};
  const std::vector<double> output = {.8137, .4935, .5065, .1863, .4935, .8137,
                                      .1863, .5065, .7259, .7259, .2741, .2741};
  const DType dtype = GetParam();
  Tensor x(dtype, {1, 1, 3, 4});
  for (int64_t s = 0; s < 3; ++s) {
    for (int64_t d = 0; d < 4; ++d) x.Set(0, 0, s, d, kX[s][d]);
  }
  const Problem problem{.dtype = dtype,
                        .batch = 1,
                        .query_heads = 1,
                        .kv_heads = 1,
                        .query_length = 3,
                        .key_length = 3,
                        .head_size = 4,
                        .value_head_size = 4,
                        .score_output = ScoreOutput::kWeights};
  // Half a unit of the fourth decimal, plus the precision of the type.
  const Tolerance allowed{ToleranceOf(dtype), std::vector<double>(3, 0.00005)};
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const absl::StatusOr<Outputs> got =
        RunAttention(problem, {x, x, x, {}, {}, {}, {}}, target.Options());
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(AllClose("weights", *got->scores, weights, allowed));
    EXPECT_TRUE(AllClose("output", got->output, output, allowed));
  }
}

INSTANTIATE_TEST_SUITE_P(Types, HandComputedExampleTest, ::testing::ValuesIn(kFloatTypes),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

}  // namespace
}  // namespace rapt::test
