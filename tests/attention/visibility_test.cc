// Block masks, selected keys, and what is exempt from the window, on every backend and instruction
// set, in every type.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>

#include <cstring>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/data_checks.h"
#include "base/round_up.h"
#include "tests/support/run_attention.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::Each;
using ::testing::HasSubstr;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr uint64_t kSeed = 20261123;
constexpr int64_t kQueries = 50;  // two blocks of rows
constexpr int64_t kKeys = 150;    // three blocks of keys

void SetBlocks(Problem& p, int64_t block_q, int64_t block_k, int64_t batch, int64_t heads) {
  p.block_q = block_q;
  p.block_k = block_k;
  p.block_mask =
      Dims{batch, heads, CeilDiv(p.query_length, block_q), CeilDiv(p.total_keys(), block_k)};
}

class VisibilityTest : public ::testing::TestWithParam<DType> {
 protected:
  static Problem Make() {
    return {.dtype = GetParam(),
            .batch = 2,
            .query_heads = 4,
            .kv_heads = 2,
            .query_length = kQueries,
            .key_length = kKeys,
            .head_size = 20,
            .value_head_size = 17,
            .wants_lse = true};
  }

  // Ways in which a problem can be sparse. REQUIRES: its lengths are final.
  static std::vector<Problem> EachSparse(const Problem& place) {
    std::vector<Problem> problems(7, place);
    SetBlocks(problems[0], 64, 64, 1, 1);
    SetBlocks(problems[1], 5, 7, 1, place.query_heads);
    SetBlocks(problems[2], 1, int64_t{1} << 62, place.batch, 1);
    problems[3].selected = SelectedIndices{1, 20};
    problems[4].selected = SelectedIndices{place.kv_heads, 90};
    problems[5].left_window = 9;
    problems[5].right_window = 3;
    problems[5].prefix_keys = 4;
    problems[5].has_global_mask = true;
    problems[6].left_window = 30;
    problems[6].prefix_keys = 70;
    SetBlocks(problems[6], 20, 16, place.batch, place.query_heads);
    problems[6].selected = SelectedIndices{place.kv_heads, place.total_keys() + 5};
    return problems;
  }
};

TEST_P(VisibilityTest, MatchesTheDefinition) {
  std::vector<Problem> places(8, Make());
  places[1].causal = true;
  places[1].softcap = 3;
  places[2].past_length = 9;
  places[2].head_sink = DType::kFloat32;
  places[3].has_key_lengths = true;
  places[3].alignment = Alignment::kOnnx;
  places[3].causal = true;
  places[3].scale = 1.5;
  places[4].mask = MaskShape{DType::kBool, {1, 4, kQueries, kKeys}};
  places[4].alibi = true;
  places[5].bias = MaskShape{GetParam(), {2, 1, kQueries, kKeys - 2}};
  places[5].mask = MaskShape{GetParam(), {1, 4, 1, 1}};
  places[6].query_length = 1;  // in place
  places[6].past_length = 69;
  places[6].wants_present = true;
  places[7].dropout = Dropout{0.3, 12};
  places[7].alignment = Alignment::kBottomRight;
  places[7].causal = true;
  Rng rng(kSeed);
  for (const Problem& place : places) {
    for (const Problem& problem : EachSparse(place)) {
      ExpectConforms(problem, RandomInputs(problem, rng));
    }
  }
}

// Of the heads that share a selection, 8 are computed in place and more from packed keys.
TEST_P(VisibilityTest, MatchesTheDefinitionForGroupsOfAnySize) {
  Rng rng(kSeed);
  for (const int64_t group : {1, 2, 3, 8, 9, 50}) {
    Problem problem = Make();
    problem.batch = 1;
    problem.query_heads = 2 * group;
    problem.query_length = 7;
    problem.head_size = problem.value_head_size = 64;
    problem.selected = SelectedIndices{2, 75};
    ExpectConforms(problem, RandomInputs(problem, rng));
    problem.mask = MaskShape{DType::kFloat32, {1, 2 * group, 7, kKeys}};
    problem.head_size = 72;
    problem.value_head_size = 9;
    ExpectConforms(problem, RandomInputs(problem, rng));
  }
}

TEST_P(VisibilityTest, MatchesTheDefinitionInTheScores) {
  Problem place = Make();
  place.batch = 1;
  place.causal = true;
  place.past_length = 30;
  Rng rng(kSeed);
  for (const ScoreOutput output : {ScoreOutput::kScores, ScoreOutput::kSoftcapped,
                                   ScoreOutput::kBiased, ScoreOutput::kWeights}) {
    place.score_output = output;
    place.query_length = output == ScoreOutput::kBiased ? 2 : kQueries;
    for (const Problem& problem : EachSparse(place)) {
      ExpectConforms(problem, RandomInputs(problem, rng));
    }
  }
}

TEST_P(VisibilityTest, MatchesTheDefinitionWithSplitKeys) {
  Problem place = Make();
  place.batch = 1;
  place.query_heads = place.kv_heads = 1;
  place.query_length = 2;
  place.key_length = 2200;
  Rng rng(kSeed);
  for (const Problem& problem : EachSparse(place)) {
    ExpectConforms(problem, RandomInputs(problem, rng), /*threads=*/16);
  }
}

TEST_P(VisibilityTest, ABlockMaskOfOnesChangesNoBit) {
  Problem plain = Make();
  plain.causal = true;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(plain, rng);
  for (const int64_t block : {1, 16, 48, 64, 1000}) {
    Problem masked = plain;
    SetBlocks(masked, block, block, 1, 1);
    inputs.block_mask = Tensor(DType::kBool, *masked.block_mask).Fill(1);
    ExpectSameOutputs(plain, inputs, masked, inputs);
  }
}

// The mask that shows what the problem shows beyond causality and lengths.
Tensor MaskOf(const Problem& problem, const Inputs& inputs) {
  const int64_t heads = problem.query_heads;
  Problem open = problem;
  open.dtype = DType::kFloat64;
  open.head_size = open.value_head_size = 1;
  open.score_output = ScoreOutput::kBiased;
  Inputs zeros = inputs;
  const auto zero = [&](int64_t rows, int64_t length) {
    return Tensor(DType::kFloat64, {problem.batch, rows, length, 1}).Fill(0);
  };
  zeros.query = zero(heads, problem.query_length);
  zeros.key = zeros.value = zero(problem.kv_heads, problem.key_length);
  const std::vector<double> scores = Attend(open, zeros).scores;
  Tensor mask(DType::kBool, {problem.batch, heads, problem.query_length, problem.key_length});
  size_t n = 0;
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t i = 0; i < problem.query_length; ++i) {
        for (int64_t j = 0; j < problem.key_length; ++j) mask.Set(b, h, i, j, scores[n++] == 0);
      }
    }
  }
  return mask;
}

TEST_P(VisibilityTest, EqualsTheMask) {
  Problem place = Make();
  place.causal = true;
  Rng rng(kSeed);
  for (const Problem& problem : EachSparse(place)) {
    SCOPED_TRACE(ToText(problem));
    Inputs inputs = RandomInputs(problem, rng);
    inputs.mask = MaskOf(problem, inputs);
    Problem masked = place;
    masked.mask = MaskShape{DType::kBool, inputs.mask->dims()};
    if (problem.selected) {  // the order of the sums differs
      Inputs selected = inputs;
      selected.mask.reset();
      for (const Target& target : Targets()) {
        const Outputs got = RunAttention(problem, selected, target.Options()).value();
        EXPECT_TRUE(Matches(masked, got, Attend(masked, inputs))) << target.Name();
      }
      continue;
    }
    Inputs sparse = inputs;
    sparse.mask.reset();
    ExpectSameOutputs(problem, sparse, masked, inputs);
  }
}

TEST_P(VisibilityTest, WhatIsHiddenDoesNotMatter) {
  Rng rng(kSeed);
  Problem place = Make();
  place.batch = 1;
  for (const int64_t queries : {int64_t{1}, kQueries}) {
    place.query_length = queries;
    for (const Problem& problem : EachSparse(place)) {
      const Inputs inputs = RandomInputs(problem, rng);
      const Expected expected = Attend(problem, inputs);
      Inputs poisoned = inputs;
      const Tensor mask = MaskOf(problem, inputs);
      for (int64_t h = 0; h < problem.kv_heads; ++h) {
        for (int64_t j = 0; j < kKeys; ++j) {
          bool seen = false;
          for (int64_t i = 0; i < queries; ++i) {
            seen = seen || mask.At(0, 2 * h, i, j) != 0 || mask.At(0, 2 * h + 1, i, j) != 0;
          }
          if (!seen) poisoned.key.Set(0, h, j, 3, kNan);
          if (!seen) poisoned.value.Set(0, h, j, 0, j % 2 == 0 ? kNan : kInf);
        }
      }
      for (const Target& target : Targets()) {
        const Outputs got = RunAttention(problem, poisoned, target.Options()).value();
        EXPECT_TRUE(Matches(problem, got, expected)) << target.Name() << ToText(problem);
      }
    }
  }
}

// A selected key that the mask hides from some of the rows.
TEST_P(VisibilityTest, ASelectedKeyMayBeHidden) {
  Rng rng(kSeed);
  for (const int64_t group : {2, 12}) {
    Problem problem = Make();
    problem.query_heads = 2 * group;
    problem.selected = SelectedIndices{1, 100};
    problem.mask = MaskShape{DType::kBool, {1, 1, 1, kKeys}};
    Inputs inputs = RandomInputs(problem, rng);
    inputs.mask->Fill(1);
    for (int64_t j = 0; j < kKeys; j += 3) inputs.mask->Set(0, 0, 0, j, 0);
    const Expected expected = Attend(problem, inputs);
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t j = 0; j < kKeys; j += 3) inputs.value.Set(b, 1, j, 2, kNan);
    }
    for (const Target& target : Targets()) {
      const Outputs got = RunAttention(problem, inputs, target.Options()).value();
      EXPECT_TRUE(Matches(problem, got, expected)) << target.Name();
    }
  }
}

// Queries with 0 to 150 keys, one after the other.
TEST_P(VisibilityTest, QueriesMaySelectDifferentNumbersOfKeys) {
  Problem problem = Make();
  problem.selected = SelectedIndices{1, kKeys};
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < kQueries; ++i) {
      const int64_t count = i % 3 == 1 ? 0 : UniformInt(rng, 0, kKeys);
      for (int64_t n = count; n < kKeys; ++n) inputs.selected->Set(b, 0, i, n, -1);
    }
  }
  ExpectConforms(problem, inputs);
}

TEST_P(VisibilityTest, WithoutVisibleKeysTheOutputIsZero) {
  Problem problem = Make();
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  SetBlocks(problem, 64, 64, 1, 1);
  inputs.block_mask = Tensor(DType::kBool, *problem.block_mask).Fill(0);
  Problem selecting = Make();
  selecting.selected = SelectedIndices{1, 3};
  inputs.selected = Tensor(DType::kInt32, {2, 1, kQueries, 3}).Fill(-1);
  Problem without = Make();
  without.selected = SelectedIndices{1, 0};
  Inputs nothing = inputs;
  nothing.selected = Tensor(DType::kInt32, {2, 1, kQueries, 0});
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    for (const auto& [p, in] :
         {std::pair{&problem, &inputs}, {&selecting, &inputs}, {&without, &nothing}}) {
      const Outputs got = RunAttention(*p, *in, target.Options()).value();
      EXPECT_THAT(got.output.ToVector(), Each(0));
      EXPECT_THAT(got.lse->ToVector(), Each(-kInf));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, VisibilityTest,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                           DType::kFloat64),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

// Rows of K or V whose second half cannot be read.
class HalfReadable {
 public:
  HalfReadable(int64_t rows, int64_t size) : bytes_(rows * size * 4) {
    memory_ = mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(memory_, MAP_FAILED);
    EXPECT_EQ(mprotect(static_cast<std::byte*>(memory_) + bytes_ / 2, bytes_ / 2, PROT_NONE), 0);
    view_ = {static_cast<const std::byte*>(memory_), DType::kFloat32, {1, 1, rows, size}};
    view_.strides = RowMajorStrides(view_.dims);
  }
  ~HalfReadable() { munmap(memory_, bytes_); }
  HalfReadable(const HalfReadable&) = delete;
  HalfReadable& operator=(const HalfReadable&) = delete;

  const TensorView& view() const { return view_; }

 private:
  const size_t bytes_;
  void* memory_;
  TensorView view_;
};

TEST(SparseTilesTest, KeysThatNobodySeesAreNotRead) {
  constexpr int64_t kRows = 2048;
  const HalfReadable keys(kRows, 32);
  const HalfReadable values(kRows, 32);
  Rng rng(kSeed);
  for (const int64_t queries : {1, 4, 100}) {
    Problem problem = {.batch = 1,
                       .query_heads = 1,
                       .kv_heads = 1,
                       .query_length = queries,
                       .key_length = kRows,
                       .head_size = 32,
                       .value_head_size = 32};
    SetBlocks(problem, 64, 64, 1, 1);
    Inputs inputs = RandomInputs(problem, rng);
    inputs.block_mask->Fill(1);
    for (int64_t n = 0; n < problem.block_mask->at(2); ++n) {
      for (int64_t k = kRows / 64 / 2; k < kRows / 64; ++k) inputs.block_mask->Set(0, 0, n, k, 0);
    }
    Problem selecting = problem;
    selecting.block_mask.reset();
    selecting.block_q.reset();
    selecting.block_k.reset();
    selecting.selected = SelectedIndices{1, 100};
    inputs.selected = Tensor(DType::kInt32, {1, 1, queries, 100});
    for (int64_t i = 0; i < queries; ++i) {
      for (int64_t n = 0; n < 100; ++n) {
        inputs.selected->Set(0, 0, i, n, static_cast<double>((i * 7 + n * 3) % (kRows / 2)));
      }
    }
    for (const Target& target : Targets()) {
      if (target.backend != "cpu") continue;  // the others read every key
      for (const Problem* p : {&problem, &selecting}) {
        const auto got = RunAttention(*p, inputs, target.Options(), Storage::kRowMajor, {},
                                      [&](Arguments& arguments) {
                                        arguments.inputs[Role::kK] = keys.view();
                                        arguments.inputs[Role::kV] = values.view();
                                      });
        ASSERT_TRUE(got.ok()) << got.status();
        EXPECT_THAT(got->output.ToVector(), Each(0));
      }
    }
  }
}

// ---- What is refused ----------------------------------------------------------------------------

Problem Small() {
  return {.batch = 2,
          .query_heads = 4,
          .kv_heads = 2,
          .query_length = 10,
          .key_length = 12,
          .past_length = 8,
          .head_size = 4,
          .value_head_size = 4};
}

TEST(VisibilityErrorsTest, NameTheFieldAndWhatIsAllowed) {
  const auto blocks = [](Problem& p, const Dims& dims) {
    p.block_q = 4;
    p.block_k = 8;
    p.block_mask = dims;
  };
  const struct {
    std::function<void(Problem&)> change;
    std::string message;
  } cases[] = {
      {[&](Problem& p) {
         blocks(p, {2, 4, 3, 2});
       },
       "block_mask is [2, 4, 3, 2]; it must be [1 or 2, 1 or 4, 3, 3], for 10 queries in blocks of "
       "4 and 20 keys in blocks of 8"},
      {[&](Problem& p) {
         blocks(p, {3, 4, 3, 3});
       },
       "it must be [1 or 2, 1 or 4, 3, 3]"},
      {[&](Problem& p) {
         blocks(p, {2, 2, 3, 3});
       },
       "it must be [1 or 2, 1 or 4, 3, 3]"},
      {[&](Problem& p) {
         blocks(p, {2, 4, 1, 3});
       },
       "it must be [1 or 2, 1 or 4, 3, 3]"},
      {[](Problem& p) { p.block_q = 0; }, "block_q is 0; it must be at least 1"},
      {[](Problem& p) { p.block_k = -8; }, "block_k is -8; it must be at least 1"},
      {[](Problem& p) {
         p.block_mask = Dims{1, 1, 1, 1};
         p.block_q = 64;
       },
       "block_mask is set but block_k is not"},
      {[](Problem& p) { p.prefix_keys = -1; }, "prefix_keys is -1; it must be at least 0"},
      {[](Problem& p) {
         p.selected = SelectedIndices{4, 3};
       },
       "selected_indices has 4 heads; it must have 1 or 2, the number of heads of K"},
      {[](Problem& p) {
         p.selected = SelectedIndices{1, -3};
       },
       "selected_indices has a last axis of -3"},
      {[](Problem& p) {
         p.selected = SelectedIndices{1, kMaxAxis};
         p.batch = 1 << 20;
       },
       "the size of selected_indices overflows 64 bits"},
      {[](Problem& p) {
         p.selected = SelectedIndices{1, 3};
         p.key_length = (int64_t{1} << 31) - 7;
       },
       "INT32 numbers at most 2147483648"},
      {[](Problem& p) {
         p.past_length = 0;
         p.section = Section{0, 0, 10, 12, 0};
         p.has_global_mask = true;
       },
       "global_mask is not available for a part of a problem"},
  };
  for (const auto& c : cases) {
    Problem problem = Small();
    c.change(problem);
    EXPECT_THAT(std::string(Validate(problem).message()), HasSubstr(c.message));
  }
}

TEST(VisibilityErrorsTest, BlocksOfAnySizeAreAllowed) {
  for (const int64_t size :
       {int64_t{1}, int64_t{7}, int64_t{1} << 40, std::numeric_limits<int64_t>::max()}) {
    Problem problem = Small();
    problem.block_q = problem.block_k = size;
    problem.block_mask = Dims{1, 1,
                              size == 1   ? 10
                              : size == 7 ? 2
                                          : 1,
                              size == 1   ? 20
                              : size == 7 ? 3
                                          : 1};
    EXPECT_TRUE(Validate(problem).ok()) << Validate(problem);
    Rng rng(kSeed);
    ExpectConforms(problem, RandomInputs(problem, rng));
  }
}

TEST(VisibilityErrorsTest, NameThePlaceOfAWrongIndex) {
  Problem problem = Small();
  problem.selected = SelectedIndices{2, 5};
  Rng rng(kSeed);
  const Inputs valid = RandomInputs(problem, rng);
  const struct {
    std::vector<double> indices;
    std::string message;  // empty: valid
  } cases[] = {
      {{0, 19, -1, 7, -1}, ""},
      {{-1, -1, -1, -1, -1}, ""},
      {{3, 20, 4, 5, 6}, "selected_indices[1, 1, 9, 1] is 20; it must be -1 or from 0 to 19"},
      {{3, 4, -2, 5, 6}, "selected_indices[1, 1, 9, 2] is -2; it must be -1 or from 0 to 19"},
      {{3, 4, -1, 3, 6}, "selected_indices[1, 1, 9, 3] is 3, which the row already has"},
      {{3, 4, 5, 6, 6}, "selected_indices[1, 1, 9, 4] is 6, which the row already has"},
      {{-2147483648.0, 4, 5, 6, 7}, "selected_indices[1, 1, 9, 0] is -2147483648"},
      {{0, 4, 5, 6, 2147483647.0}, "selected_indices[1, 1, 9, 4] is 2147483647"},
  };
  for (const auto& c : cases) {
    Inputs inputs = valid;
    for (int64_t n = 0; n < 5; ++n) inputs.selected->Set(1, 1, 9, n, c.indices[n]);
    for (const Target& target : Targets()) {
      const auto got = RunAttention(problem, inputs, target.Options());
      EXPECT_EQ(got.ok(), c.message.empty()) << got.status();
      EXPECT_THAT(std::string(got.status().message()), HasSubstr(c.message));
    }
  }
}

TEST(DataChecksTest, FindTheFirstErrorWithManyThreads) {
  Problem problem = {.batch = 1,
                     .query_heads = 1,
                     .kv_heads = 1,
                     .query_length = 4000,
                     .key_length = 4000,
                     .head_size = 8,
                     .value_head_size = 8,
                     .selected = SelectedIndices{1, 20}};
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  EXPECT_EQ(DataChecks(problem), 3);
  inputs.selected->Set(0, 0, 3999, 0, -7);
  inputs.selected->Set(0, 0, 17, 2, 4000);
  const auto got = RunAttention(problem, inputs, {.backend = "cpu", .threads = 4});
  EXPECT_THAT(std::string(got.status().message()),
              HasSubstr("selected_indices[0, 0, 17, 2] is 4000"));
}

TEST(SparsePlanTest, FlopsOfASelectionAreLinear) {
  Problem problem = Small();
  problem.past_length = 0;
  problem.key_length = problem.query_length = 4096;
  const double dense = MakePlan(problem, {.backend = "cpu"})->flops;
  problem.selected = SelectedIndices{1, 64};
  EXPECT_EQ(MakePlan(problem, {.backend = "cpu"})->flops, dense / 64);
  problem.selected.reset();
  problem.left_window = 59;
  problem.right_window = 0;
  problem.prefix_keys = 4;
  EXPECT_NEAR(MakePlan(problem, {.backend = "cpu"})->flops, dense / 64, dense / 1000);
}

}  // namespace
}  // namespace rapt::test
