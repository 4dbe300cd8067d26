// Calls of the operator: every accepted form with its problem, every rejected one with its message.
#include "attention/operator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <functional>
#include <initializer_list>
#include <limits>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "base/aligned_buffer.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr double kInf = std::numeric_limits<double>::infinity();
using Change = std::function<void(OperatorCall&)>;

OperatorCall Rank4(const Change& change = [](OperatorCall&) {}) {
  OperatorCall call;
  call.inputs[Role::kQ] = TensorSpec{DType::kFloat32, {2, 8, 16, 64}};
  call.inputs[Role::kK] = TensorSpec{DType::kFloat32, {2, 4, 20, 64}};
  call.inputs[Role::kV] = TensorSpec{DType::kFloat32, {2, 4, 20, 32}};
  change(call);
  return call;
}

OperatorCall Rank3WithHeads(const Change& change = [](OperatorCall&) {}) {
  OperatorCall call;
  call.inputs[Role::kQ] = TensorSpec{DType::kFloat32, {2, 16, 8 * 64}};
  call.inputs[Role::kK] = TensorSpec{DType::kFloat32, {2, 20, 4 * 64}};
  call.inputs[Role::kV] = TensorSpec{DType::kFloat32, {2, 20, 4 * 32}};
  call.q_num_heads = 8;
  call.kv_num_heads = 4;
  change(call);
  return call;
}

OperatorCall Rank3WithoutHeads(const Change& change = [](OperatorCall&) {}) {
  OperatorCall call;
  call.inputs[Role::kQ] = TensorSpec{DType::kFloat32, {2, 16, 64}};
  call.inputs[Role::kK] = TensorSpec{DType::kFloat32, {2, 20, 64}};
  call.inputs[Role::kV] = TensorSpec{DType::kFloat32, {2, 20, 32}};
  change(call);
  return call;
}

ResolvedCall MustResolve(const OperatorCall& call) {
  absl::StatusOr<ResolvedCall> resolved = Resolve(call);
  EXPECT_TRUE(resolved.ok()) << resolved.status();
  return resolved.ok() ? *std::move(resolved) : ResolvedCall{};
}

void ExpectSizes(const Problem& p, std::array<int64_t, 8> sizes) {
  EXPECT_THAT((std::array<int64_t, 8>{p.batch, p.query_heads, p.kv_heads, p.query_length,
                                      p.key_length, p.past_length, p.head_size, p.value_head_size}),
              ::testing::ElementsAreArray(sizes));
}

TEST(ResolveTest, Rank4IsBhsd) {
  const ResolvedCall resolved = MustResolve(Rank4([](OperatorCall& c) {
    c.wants_lse = c.wants_present = true;
    c.score_output = ScoreOutput::kBiased;
  }));
  ExpectSizes(resolved.problem, {2, 8, 4, 16, 20, 0, 64, 32});
  EXPECT_EQ(resolved.layout, Layout::kBhsd);
  EXPECT_THAT(resolved.outputs[Role::kY].shape, ElementsAre(2, 8, 16, 32));
  EXPECT_THAT(resolved.outputs[Role::kLse].shape, ElementsAre(2, 8, 16));
  EXPECT_THAT(resolved.outputs[Role::kScores].shape, ElementsAre(2, 8, 16, 20));
  EXPECT_THAT(resolved.outputs[Role::kPresentKey].shape, ElementsAre(2, 4, 20, 64));
  EXPECT_THAT(resolved.outputs[Role::kPresentValue].shape, ElementsAre(2, 4, 20, 32));
}

TEST(ResolveTest, VMayBeAPartOfK) {
  for (const auto& change : {&Rank4, &Rank3WithHeads}) {
    const ResolvedCall resolved = MustResolve((*change)([](OperatorCall& c) {
      c.inputs[Role::kV].reset();
      c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, 7, 64}};
      c.v_head_size = 48;
      c.wants_present = true;
    }));
    ExpectSizes(resolved.problem, {2, 8, 4, 16, 20, 7, 64, 48});
    EXPECT_TRUE(resolved.problem.values_in_keys);
    EXPECT_FALSE(OutputsOf(resolved.problem).contains(Role::kPresentValue));
    EXPECT_THAT(resolved.outputs[Role::kPresentKey].shape, ElementsAre(2, 4, 27, 64));
  }
}

TEST(ResolveTest, Rank4MayBeBshd) {
  const ResolvedCall resolved = MustResolve(Rank4([](OperatorCall& c) {
    c.layout = Layout::kBshd;
    c.inputs[Role::kQ]->shape = {2, 16, 8, 64};
    c.inputs[Role::kK]->shape = {2, 20, 4, 64};
    c.inputs[Role::kV]->shape = {2, 20, 4, 32};
    c.wants_lse = c.wants_present = true;
    c.score_output = ScoreOutput::kWeights;
  }));
  ExpectSizes(resolved.problem, {2, 8, 4, 16, 20, 0, 64, 32});
  EXPECT_EQ(resolved.layout, Layout::kBshd);
  EXPECT_THAT(resolved.outputs[Role::kY].shape, ElementsAre(2, 16, 8, 32));
  EXPECT_THAT(resolved.outputs[Role::kLse].shape, ElementsAre(2, 8, 16));
  EXPECT_THAT(resolved.outputs[Role::kScores].shape, ElementsAre(2, 8, 16, 20));
  EXPECT_THAT(resolved.outputs[Role::kPresentKey].shape, ElementsAre(2, 4, 20, 64));
}

TEST(ResolveTest, Rank3WithHeadCountsSplitsTheLastAxis) {
  for (const Layout layout : {Layout::kByRank, Layout::kBse}) {
    const ResolvedCall resolved = MustResolve(Rank3WithHeads([&](OperatorCall& c) {
      c.layout = layout;
      c.wants_lse = c.wants_present = true;
      c.score_output = ScoreOutput::kScores;
    }));
    ExpectSizes(resolved.problem, {2, 8, 4, 16, 20, 0, 64, 32});
    EXPECT_EQ(resolved.layout, Layout::kBse);
    EXPECT_THAT(resolved.outputs[Role::kY].shape, ElementsAre(2, 16, 8 * 32));
    EXPECT_THAT(resolved.outputs[Role::kLse].shape, ElementsAre(2, 8, 16));
    EXPECT_THAT(resolved.outputs[Role::kScores].shape, ElementsAre(2, 8, 16, 20));
    EXPECT_THAT(resolved.outputs[Role::kPresentKey].shape, ElementsAre(2, 4, 20, 64));
    EXPECT_THAT(resolved.outputs[Role::kPresentValue].shape, ElementsAre(2, 4, 20, 32));
  }
}

TEST(ResolveTest, Rank3WithoutHeadCountsIsOneHead) {
  const ResolvedCall resolved = MustResolve(Rank3WithoutHeads([](OperatorCall& c) {
    c.wants_lse = true;
    c.score_output = ScoreOutput::kScores;
  }));
  ExpectSizes(resolved.problem, {2, 1, 1, 16, 20, 0, 64, 32});
  EXPECT_THAT(resolved.outputs[Role::kY].shape, ElementsAre(2, 16, 32));
  EXPECT_THAT(resolved.outputs[Role::kLse].shape, ElementsAre(2, 1, 16));
  EXPECT_THAT(resolved.outputs[Role::kScores].shape, ElementsAre(2, 1, 16, 20));
}

TEST(ResolveTest, PastComesBeforeTheKeysAndStaysRank4) {
  for (OperatorCall call : {Rank4(), Rank3WithHeads()}) {
    call.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, 7, 64}};
    call.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 7, 32}};
    call.score_output = ScoreOutput::kScores;
    call.wants_present = true;
    const ResolvedCall resolved = MustResolve(call);
    ExpectSizes(resolved.problem, {2, 8, 4, 16, 20, 7, 64, 32});
    EXPECT_THAT(resolved.outputs[Role::kScores].shape, ElementsAre(2, 8, 16, 27));
    EXPECT_THAT(resolved.outputs[Role::kPresentKey].shape, ElementsAre(2, 4, 27, 64));
    EXPECT_THAT(resolved.outputs[Role::kPresentValue].shape, ElementsAre(2, 4, 27, 32));
  }
}

TEST(ResolveTest, PastMayBeEmpty) {
  const ResolvedCall resolved = MustResolve(Rank4([](OperatorCall& c) {
    c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, 0, 64}};
    c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 0, 32}};
  }));
  EXPECT_EQ(resolved.problem.past_length, 0);
}

TEST(ResolveTest, OutputsHaveTheDocumentedTypes) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    const ResolvedCall resolved = MustResolve(Rank4([&](OperatorCall& c) {
      c.inputs[Role::kQ]->dtype = c.inputs[Role::kK]->dtype = c.inputs[Role::kV]->dtype = dtype;
      c.wants_lse = c.wants_present = true;
      c.score_output = ScoreOutput::kWeights;
    }));
    EXPECT_EQ(resolved.problem.dtype, dtype);
    EXPECT_EQ(resolved.outputs[Role::kY].dtype, dtype);
    EXPECT_EQ(resolved.outputs[Role::kScores].dtype, dtype);
    EXPECT_EQ(resolved.outputs[Role::kPresentKey].dtype, dtype);
    EXPECT_EQ(resolved.outputs[Role::kPresentValue].dtype, dtype);
    EXPECT_EQ(resolved.outputs[Role::kLse].dtype,
              dtype == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32);
  }
}

TEST(ResolveTest, TheDefaultsAreThoseOfTheOperator) {
  const Problem problem = MustResolve(Rank4()).problem;
  EXPECT_EQ(problem.effective_scale(), 0.125);
  EXPECT_EQ(problem.softcap, 0);
  EXPECT_FALSE(problem.causal);
  EXPECT_EQ(problem.alignment, Alignment::kTopLeft);
  EXPECT_EQ(problem.left_window, -1);
  EXPECT_EQ(problem.right_window, -1);
  EXPECT_FALSE(problem.mask.has_value());
  EXPECT_FALSE(problem.has_key_lengths);
  EXPECT_FALSE(problem.softmax_in_fp64);
  EXPECT_FALSE(problem.dropout.has_value());
  EXPECT_FALSE(problem.score_output.has_value());
  EXPECT_FALSE(problem.wants_lse);
  EXPECT_FALSE(problem.wants_present);
}

// The batch, heads and length of Q may be 0, and so may the number of keys.
TEST(ResolveTest, EmptyAxesAreAccepted) {
  EXPECT_THAT(MustResolve(Rank4([](OperatorCall& c) {
                c.inputs[Role::kQ]->shape[0] = c.inputs[Role::kK]->shape[0] =
                    c.inputs[Role::kV]->shape[0] = 0;
              }))
                  .outputs[Role::kY]
                  .shape,
              ElementsAre(0, 8, 16, 32));
  EXPECT_THAT(MustResolve(Rank4([](OperatorCall& c) { c.inputs[Role::kQ]->shape[2] = 0; }))
                  .outputs[Role::kY]
                  .shape,
              ElementsAre(2, 8, 0, 32));
  EXPECT_THAT(MustResolve(Rank4([](OperatorCall& c) { c.inputs[Role::kQ]->shape[1] = 0; }))
                  .outputs[Role::kY]
                  .shape,
              ElementsAre(2, 0, 16, 32));
  EXPECT_THAT(MustResolve(Rank4([](OperatorCall& c) {
                c.inputs[Role::kK]->shape[2] = c.inputs[Role::kV]->shape[2] = 0;
              }))
                  .outputs[Role::kY]
                  .shape,
              ElementsAre(2, 8, 16, 32));
}

struct MaskForm {
  const char* name;
  OperatorCall (*base)(const Change&);
  Shape mask;
  std::array<int64_t, 4> dims;
};

class MaskFormTest : public ::testing::TestWithParam<MaskForm> {};

TEST_P(MaskFormTest, BroadcastsAsNumpyDoes) {
  const MaskForm& form = GetParam();
  for (const DType dtype :
       {DType::kBool, DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    const ResolvedCall resolved = MustResolve(form.base([&](OperatorCall& c) {
      c.inputs[Role::kMask] = TensorSpec{dtype, form.mask};
    }));
    ASSERT_TRUE(resolved.problem.mask.has_value());
    EXPECT_EQ(resolved.problem.mask->dtype, dtype);
    EXPECT_EQ(resolved.problem.mask->dims, form.dims);

    const std::byte bytes[1] = {};
    const TensorView view = resolved.Input(Role::kMask, bytes);
    EXPECT_EQ(view.dims, form.dims);
    const std::array<int64_t, 4> full = {resolved.problem.batch, resolved.problem.query_heads,
                                         resolved.problem.query_length,
                                         resolved.problem.total_keys()};
    const std::array<int64_t, 4> row_major = RowMajorStrides(form.dims);
    for (int axis = 0; axis < 4; ++axis) {
      if (form.dims[axis] == full[axis]) {
        EXPECT_TRUE(full[axis] == 1 || view.strides[axis] == row_major[axis]) << "axis " << axis;
      } else if (form.dims[axis] == 1) {
        EXPECT_EQ(view.strides[axis], 0) << "axis " << axis;
      }
    }
  }
}

INSTANTIATE_TEST_SUITE_P(
    Forms, MaskFormTest,
    ::testing::ValuesIn(std::vector<MaskForm>{
        {"keys", Rank4, {20}, {1, 1, 1, 20}},
        {"one", Rank4, {1}, {1, 1, 1, 1}},
        {"queries_keys", Rank4, {16, 20}, {1, 1, 16, 20}},
        {"queries_one", Rank4, {16, 1}, {1, 1, 16, 1}},
        {"one_keys", Rank4, {1, 20}, {1, 1, 1, 20}},
        {"heads_queries_keys", Rank4, {8, 16, 20}, {1, 8, 16, 20}},
        {"heads_one_keys", Rank4, {8, 1, 20}, {1, 8, 1, 20}},
        {"one_queries_keys", Rank4, {1, 16, 20}, {1, 1, 16, 20}},
        {"full", Rank4, {2, 8, 16, 20}, {2, 8, 16, 20}},
        {"batch_keys", Rank4, {2, 1, 1, 20}, {2, 1, 1, 20}},
        {"batch_queries_keys", Rank4, {2, 1, 16, 20}, {2, 1, 16, 20}},
        {"full_but_keys", Rank4, {2, 8, 16, 1}, {2, 8, 16, 1}},
        {"ones", Rank4, {1, 1, 1, 1}, {1, 1, 1, 1}},
        {"short", Rank4, {16, 13}, {1, 1, 16, 13}},
        {"short_of_rank_1", Rank4, {2}, {1, 1, 1, 2}},
        {"rank_3_keys", Rank3WithHeads, {20}, {1, 1, 1, 20}},
        {"rank_3_heads_queries_keys", Rank3WithHeads, {8, 16, 20}, {1, 8, 16, 20}},
        {"rank_3_full", Rank3WithHeads, {2, 8, 16, 20}, {2, 8, 16, 20}},
        {"one_head_queries_keys", Rank3WithoutHeads, {16, 20}, {1, 1, 16, 20}},
        {"one_head_batch_queries_keys", Rank3WithoutHeads, {2, 16, 20}, {2, 1, 16, 20}},
        {"one_head_batch_one_keys", Rank3WithoutHeads, {2, 1, 20}, {2, 1, 1, 20}},
        {"one_head_full", Rank3WithoutHeads, {2, 1, 16, 20}, {2, 1, 16, 20}},
    }),
    [](const auto& info) { return std::string(info.param.name); });

TEST(ResolveTest, AMaskCoversPastToo) {
  const auto with_past = [](OperatorCall& c) {
    c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, 7, 64}};
    c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 7, 32}};
    c.inputs[Role::kMask] = TensorSpec{DType::kBool, {16, 27}};
  };
  EXPECT_THAT(MustResolve(Rank4(with_past)).problem.mask->dims, ElementsAre(1, 1, 16, 27));
}

struct InvalidCall {
  const char* name;
  OperatorCall call;
  std::vector<std::string> words;  // substrings of the message: the field and both values
};

void PrintTo(const InvalidCall& c, std::ostream* out) { *out << c.name; }

class InvalidCallTest : public ::testing::TestWithParam<InvalidCall> {};

TEST_P(InvalidCallTest, NamesTheFieldAndBothValues) {
  const absl::Status status = Resolve(GetParam().call).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const std::string& word : GetParam().words) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  }
}

std::string CaseName(const ::testing::TestParamInfo<InvalidCall>& info) { return info.param.name; }

INSTANTIATE_TEST_SUITE_P(
    Ranks, InvalidCallTest,
    ::testing::ValuesIn(
        std::vector<InvalidCall>{
            {"q_of_rank_0",
             Rank4([](auto& c) { c.inputs[Role::kQ]->shape = {}; }),
             {"Q", "0", "3", "4"}},
            {"q_of_rank_2",
             Rank4([](auto& c) {
               c.inputs[Role::kQ]->shape = {16, 64};
             }),
             {"Q", "2", "3", "4"}},
            {"q_of_rank_7",
             Rank4([](auto& c) { c.inputs[Role::kQ]->shape = {1, 1, 1, 1, 1, 1, 1}; }),
             {"Q", "7"}},
            {"k_of_rank_3",
             Rank4([](auto& c) {
               c.inputs[Role::kK]->shape = {2, 20, 64};
             }),
             {"K", "3", "4"}},
            {"v_of_rank_5",
             Rank4([](auto& c) {
               c.inputs[Role::kV]->shape = {2, 4, 20, 32, 1};
             }),
             {"V", "5", "4"}},
            {"rank_3_as_bhsd",
             Rank3WithHeads([](auto& c) { c.layout = Layout::kBhsd; }),
             {"Q", "3", "4"}},
            {"rank_3_as_bshd",
             Rank3WithHeads([](auto& c) { c.layout = Layout::kBshd; }),
             {"Q", "3", "4"}},
            {"rank_4_as_bse", Rank4([](auto& c) { c.layout = Layout::kBse; }), {"Q", "4", "3"}},
            {"mask_of_rank_0",
             Rank4([](auto& c) {
               c.inputs[Role::kMask] = TensorSpec{DType::kBool, {}};
             }),
             {"attn_mask", "0", "1", "4"}},
            {"mask_of_rank_5",
             Rank4([](auto& c) {
               c.inputs[Role::kMask] = TensorSpec{DType::kBool, {1, 1, 1, 16, 20}};
             }),
             {"attn_mask", "5", "4"}},
            {"past_of_rank_3",
             Rank4([](auto& c) {
               c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 7, 64}};
               c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 7, 32}};
             }),
             {"past_key", "3", "4"}},
            {"lengths_of_rank_2",
             Rank4([](auto& c) {
               c.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {2, 1}};
             }),
             {"nonpad_kv_seqlen", "[2, 1]", "[2]"}},
            {"bias_of_bool",
             Rank4([](auto& c) {
               c.inputs[Role::kBias] = TensorSpec{DType::kBool, {16, 20}};
             }),
             {"attention_bias", "BOOL", "a float type"}},
            {"bias_of_other_queries",
             Rank4([](auto& c) {
               c.inputs[Role::kBias] = TensorSpec{DType::kFloat32, {15, 20}};
             }),
             {"attention_bias", "[1, 1, 15, 20]", "16"}},
            {"a_sink_for_each_key_head",
             Rank4([](auto& c) {
               c.inputs[Role::kHeadSink] = TensorSpec{DType::kFloat32, {99}};
             }),
             {"head_sink", "[99]", "heads of Q"}},
            {"v_beside_v_head_size",
             Rank4([](auto& c) { c.v_head_size = 32; }),
             {"V", "v_head_size", "both set"}},
            {"past_value_beside_v_head_size",
             Rank4([](auto& c) {
               c.v_head_size = 32;
               c.inputs[Role::kV].reset();
               c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, 7, 64}};
               c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 7, 32}};
             }),
             {"past_value", "v_head_size", "both set"}},
            {"v_head_size_of_0",
             Rank4([](auto& c) {
               c.v_head_size = 0;
               c.inputs[Role::kV].reset();
             }),
             {"v_head_size", "0", "from 1 to 64"}},
            {"v_head_size_above_the_head_size",
             Rank4([](auto& c) {
               c.v_head_size = 65;
               c.inputs[Role::kV].reset();
             }),
             {"v_head_size", "65", "from 1 to 64"}},
            {"neither_v_nor_v_head_size",
             Rank4([](auto& c) { c.inputs[Role::kV].reset(); }),
             {"V", "missing"}},
            {"slopes_for_each_key_head",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kAlibiSlopes] = TensorSpec{DType::kFloat32, {4}};
                 }),
             {"alibi_slopes", "[4]", "[8] or [2, 8]"}},
            {"slopes_of_rank_3",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kAlibiSlopes] = TensorSpec{DType::kFloat32, {1, 2, 8}};
                 }),
             {"alibi_slopes", "[1, 2, 8]", "[8] or [2, 8]"}},
            {"slopes_of_another_batch",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kAlibiSlopes] = TensorSpec{DType::kFloat32, {3, 8}};
                 }),
             {"alibi_slopes", "batch 3", "1 or 2"}},
            {"buckets_of_other_heads",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kBiasTable] = TensorSpec{DType::kFloat32, {8, 32}};
                 }),
             {"bias_table", "[8, 32]", "[buckets, 8]"}},
            {"one_bucket",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kBiasTable] = TensorSpec{DType::kFloat32, {1, 8}};
                 }),
             {"bias_table", "1 buckets", "from 2"}},
            {"too_few_buckets_for_both_directions",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kBiasTable] = TensorSpec{DType::kFloat32, {3, 8}};
                   c.is_bidirectional = true;
                 }),
             {"bias_table", "3 buckets", "from 4", "is_bidirectional"}},
            {"max_distance_within_the_exact_buckets",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kBiasTable] = TensorSpec{DType::kFloat32, {32, 8}};
                   c.max_distance = 16;
                 }),
             {"max_distance", "16", "bias_table"}},
            {"max_distance_of_0",
             Rank4([](auto& c) { c.max_distance = 0; }),
             {"max_distance", "0"}},
            {"default_max_distance_within_the_exact_buckets",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kBiasTable] = TensorSpec{DType::kFloat32, {256, 8}};
                 }),
             {"max_distance", "128", "bias_table"}},
            {"even_relative_bias",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeBias] = TensorSpec{DType::kFloat32, {8, 6}};
                 }),
             {"relative_bias", "6", "2c + 1"}},
            {"empty_relative_bias",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeBias] = TensorSpec{DType::kFloat32, {8, 0}};
                 }),
             {"relative_bias", "0", "2c + 1"}},
            {"relative_bias_of_other_heads",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeBias] = TensorSpec{DType::kFloat32, {4, 5}};
                 }),
             {"relative_bias", "heads 4", "1 or 8"}},
            {"relative_bias_of_rank_1",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeBias] = TensorSpec{DType::kFloat32, {5}};
                 }),
             {"relative_bias", "[5]", "rank 2"}},
            {"even_relative_keys",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeKeys] = TensorSpec{DType::kFloat32, {8, 6, 64}};
                 }),
             {"relative_keys", "6 distances", "2c + 1"}},
            {"empty_relative_values",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeValues] = TensorSpec{DType::kFloat32, {8, 0, 32}};
                 }),
             {"relative_values", "0 distances", "2c + 1"}},
            {"relative_keys_of_other_heads",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeKeys] = TensorSpec{DType::kFloat32, {4, 5, 64}};
                 }),
             {"relative_keys", "heads 4", "1 or 8"}},
            {"relative_values_without_heads",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeValues] = TensorSpec{DType::kFloat32, {0, 5, 32}};
                 }),
             {"relative_values", "heads 0", "1 or 8"}},
            {"relative_keys_of_rank_2",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeKeys] = TensorSpec{DType::kFloat32, {5, 64}};
                 }),
             {"relative_keys", "[5, 64]", "[1 or heads, 2c + 1, 64]", "Q"}},
            {"relative_keys_of_another_head_size",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeKeys] = TensorSpec{DType::kFloat32, {8, 5, 32}};
                 }),
             {"relative_keys", "[8, 5, 32]", "[1 or heads, 2c + 1, 64]"}},
            {"relative_values_of_the_head_size_of_keys",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeValues] = TensorSpec{DType::kFloat32, {8, 5, 64}};
                 }),
             {"relative_values", "[8, 5, 64]", "[1 or heads, 2c + 1, 32]", "V"}},
            {"huge_relative_keys",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeKeys] =
                       TensorSpec{DType::kFloat32, {8, (int64_t{1} << 50) + 1, 64}};
                 }),
             {"relative_keys", "1125899906842625 distances", "2c + 1"}},
            {"relative_keys_of_additive_scores",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeKeys] = TensorSpec{DType::kFloat32, {8, 5, 64}};
                   c.inputs[Role::kAdditiveWeight] = TensorSpec{DType::kFloat32, {8, 64}};
                   c.score_function = ScoreFunction::kAdditive;
                 }),
             {"relative_keys", "additive_weight", "dot products"}},
            {"relative_query_without_keys",
             Rank4([](auto& c) { c.inputs[Role::kRelativeQuery] = c.inputs[Role::kQ]; }),
             {"relative_query", "relative_keys"}},
            {"relative_query_of_one_head",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeKeys] = TensorSpec{DType::kFloat32, {8, 5, 64}};
                   c.inputs[Role::kRelativeQuery] = TensorSpec{DType::kFloat32, {2, 1, 16, 64}};
                 }),
             {"relative_query", "[2, 1, 16, 64]", "[2, 8, 16, 64]", "Q"}},
            {"additive_scores_without_weights",
             Rank4([](auto& c) { c.score_function = ScoreFunction::kAdditive; }),
             {"score_function is additive", "additive_weight is missing"}},
            {"additive_weight_for_dot_products",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kAdditiveWeight] = TensorSpec{DType::kFloat32, {8, 64}};
                 }),
             {"additive_weight", "score_function is dot_product", "additive"}},
            {"additive_weight_of_another_head_size",
             Rank4(
                 [](auto& c) {
                   c.score_function = ScoreFunction::kAdditive;
                   c.inputs[Role::kAdditiveWeight] = TensorSpec{DType::kFloat32, {8, 32}};
                 }),
             {"additive_weight", "[8, 32]", "[1 or heads, 64]"}},
            {"additive_weight_of_rank_1",
             Rank4(
                 [](auto& c) {
                   c.score_function = ScoreFunction::kAdditive;
                   c.inputs[Role::kAdditiveWeight] = TensorSpec{DType::kFloat32, {64}};
                 }),
             {"additive_weight", "[64]", "[1 or heads, 64]"}},
            {"additive_weight_of_key_heads",
             Rank4(
                 [](auto& c) {
                   c.score_function = ScoreFunction::kAdditive;
                   c.inputs[Role::kAdditiveWeight] = TensorSpec{DType::kFloat32, {4, 64}};
                 }),
             {"additive_weight", "heads 4", "1 or 8"}},
            {"unknown_score_function",
             Rank4([](auto& c) { c.score_function = static_cast<ScoreFunction>(7); }),
             {"score_function is 7", "dot_product or additive"}},
            {"two_biases_by_distance",
             Rank4(
                 [](auto& c) {
                   c.inputs[Role::kRelativeBias] = TensorSpec{DType::kFloat32, {8, 5}};
                   c.alibi = true;
                 }),
             {"alibi", "relative_bias", "at most one"}},
        }),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Types, InvalidCallTest,
    ::testing::ValuesIn(std::vector<InvalidCall>{
        {"q_of_int64",
         Rank4([](auto& c) {
           c.inputs[Role::kQ]->dtype = c.inputs[Role::kK]->dtype = c.inputs[Role::kV]->dtype =
               DType::kInt64;
         }),
         {"Q", "INT64"}},
        {"q_of_bool",
         Rank4([](auto& c) {
           c.inputs[Role::kQ]->dtype = c.inputs[Role::kK]->dtype = c.inputs[Role::kV]->dtype =
               DType::kBool;
         }),
         {"Q", "BOOL"}},
        {"q_alone_of_int64",
         Rank4([](auto& c) { c.inputs[Role::kQ]->dtype = DType::kInt64; }),
         {"Q has type INT64; it must be FP32, FP16, BF16 or FP64"}},
        {"k_of_another_type",
         Rank4([](auto& c) { c.inputs[Role::kK]->dtype = DType::kFloat16; }),
         {"K", "FP16", "FP32"}},
        {"v_of_another_type",
         Rank4([](auto& c) { c.inputs[Role::kV]->dtype = DType::kBFloat16; }),
         {"V", "BF16", "FP32"}},
        {"past_of_another_type",
         Rank4([](auto& c) {
           c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, 7, 64}};
           c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat64, {2, 4, 7, 32}};
         }),
         {"past_value", "FP64", "FP32"}},
        {"mask_of_int64",
         Rank4([](auto& c) {
           c.inputs[Role::kMask] = TensorSpec{DType::kInt64, {16, 20}};
         }),
         {"attn_mask", "INT64", "BOOL"}},
        {"lengths_of_fp32",
         Rank4([](auto& c) {
           c.inputs[Role::kKeyLengths] = TensorSpec{DType::kFloat32, {2}};
         }),
         {"nonpad_kv_seqlen", "FP32", "INT64"}},
        {"sink_of_fp16_for_fp32",
         Rank4([](auto& c) {
           const int64_t heads = c.inputs[Role::kQ]->shape[1];
           c.inputs[Role::kHeadSink] = TensorSpec{DType::kFloat16, {heads}};
         }),
         {"head_sink", "FP16", "FP32"}},
        {"slopes_of_fp16_for_fp32",
         Rank4([](auto& c) {
           c.inputs[Role::kAlibiSlopes] = TensorSpec{DType::kFloat16, {8}};
         }),
         {"alibi_slopes", "FP16", "FP32"}},
        {"buckets_of_bool",
         Rank4([](auto& c) {
           c.inputs[Role::kBiasTable] = TensorSpec{DType::kBool, {8, 8}};
         }),
         {"bias_table", "BOOL", "FP32"}},
        {"additive_weight_of_bf16_for_fp32",
         Rank4([](auto& c) {
           c.score_function = ScoreFunction::kAdditive;
           c.inputs[Role::kAdditiveWeight] = TensorSpec{DType::kBFloat16, {8, 64}};
         }),
         {"additive_weight", "BF16", "FP32"}},
        {"relative_bias_of_fp64_for_fp32",
         Rank4([](auto& c) {
           c.inputs[Role::kRelativeBias] = TensorSpec{DType::kFloat64, {8, 5}};
         }),
         {"relative_bias", "FP64", "FP32"}},
        {"relative_keys_of_fp16_for_fp32",
         Rank4([](auto& c) {
           c.inputs[Role::kRelativeKeys] = TensorSpec{DType::kFloat16, {8, 5, 64}};
         }),
         {"relative_keys", "FP16", "FP32"}},
        {"relative_values_of_bool",
         Rank4([](auto& c) {
           c.inputs[Role::kRelativeValues] = TensorSpec{DType::kBool, {8, 5, 32}};
         }),
         {"relative_values", "BOOL", "FP32"}},
        {"relative_query_of_fp64_for_fp32",
         Rank4([](auto& c) {
           c.inputs[Role::kRelativeKeys] = TensorSpec{DType::kFloat32, {8, 5, 64}};
           c.inputs[Role::kRelativeQuery] = TensorSpec{DType::kFloat64, {2, 8, 16, 64}};
         }),
         {"relative_query", "FP64", "FP32"}},
    }),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Sizes, InvalidCallTest,
    ::testing::ValuesIn(std::vector<InvalidCall>{
        {"k_batch",
         Rank4([](auto& c) { c.inputs[Role::kK]->shape[0] = 3; }),
         {"K", "3", "2", "batch"}},
        {"v_batch",
         Rank4([](auto& c) { c.inputs[Role::kV]->shape[0] = 1; }),
         {"V", "1", "2", "batch"}},
        {"k_head_size",
         Rank4([](auto& c) { c.inputs[Role::kK]->shape[3] = 65; }),
         {"K", "65", "Q", "64"}},
        {"v_heads", Rank4([](auto& c) { c.inputs[Role::kV]->shape[1] = 8; }), {"V", "8", "K", "4"}},
        {"v_length",
         Rank4([](auto& c) { c.inputs[Role::kV]->shape[2] = 21; }),
         {"V", "21", "K", "20"}},
        {"heads_do_not_divide",
         Rank4([](auto& c) { c.inputs[Role::kK]->shape[1] = c.inputs[Role::kV]->shape[1] = 3; }),
         {"8", "3"}},
        {"more_kv_heads_than_heads",
         Rank4([](auto& c) { c.inputs[Role::kK]->shape[1] = c.inputs[Role::kV]->shape[1] = 16; }),
         {"8", "16"}},
        {"no_kv_heads",
         Rank4([](auto& c) { c.inputs[Role::kK]->shape[1] = c.inputs[Role::kV]->shape[1] = 0; }),
         {"key/value heads", "0", "1"}},
        {"no_head_size",
         Rank4([](auto& c) { c.inputs[Role::kQ]->shape[3] = c.inputs[Role::kK]->shape[3] = 0; }),
         {"0", "Q"}},
        {"no_value_head_size",
         Rank4([](auto& c) { c.inputs[Role::kV]->shape[3] = 0; }),
         {"0", "V"}},
        {"only_past_key",
         Rank4([](auto& c) {
           c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, 7, 64}};
         }),
         {"past_key", "past_value"}},
        {"only_past_value",
         Rank4([](auto& c) {
           c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 7, 32}};
         }),
         {"past_key", "past_value"}},
        {"past_batch",
         Rank4([](auto& c) {
           c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {3, 4, 7, 64}};
           c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 7, 32}};
         }),
         {"past_key", "3", "2"}},
        {"past_heads",
         Rank4([](auto& c) {
           c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 8, 7, 64}};
           c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 7, 32}};
         }),
         {"past_key", "8", "4"}},
        {"past_head_size",
         Rank4([](auto& c) {
           c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, 7, 63}};
           c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 7, 32}};
         }),
         {"past_key", "63", "64"}},
        {"past_value_head_size",
         Rank4([](auto& c) {
           c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, 7, 64}};
           c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 7, 31}};
         }),
         {"past_value", "31", "32"}},
        {"past_lengths",
         Rank4([](auto& c) {
           c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, 7, 64}};
           c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, 6, 32}};
         }),
         {"past_value", "6", "7"}},
        {"mask_batch",
         Rank4([](auto& c) {
           c.inputs[Role::kMask] = TensorSpec{DType::kBool, {3, 8, 16, 20}};
         }),
         {"attn_mask", "[3, 8, 16, 20]", "[2, 8, 16, 20]"}},
        {"mask_heads",
         Rank4([](auto& c) {
           c.inputs[Role::kMask] = TensorSpec{DType::kBool, {2, 4, 16, 20}};
         }),
         {"attn_mask", "[2, 4, 16, 20]", "[2, 8, 16, 20]"}},
        {"mask_queries",
         Rank4([](auto& c) {
           c.inputs[Role::kMask] = TensorSpec{DType::kBool, {15, 20}};
         }),
         {"attn_mask", "15, 20]", "[2, 8, 16, 20]"}},
        {"mask_longer_than_keys",
         Rank4([](auto& c) {
           c.inputs[Role::kMask] = TensorSpec{DType::kBool, {16, 21}};
         }),
         {"attn_mask", "21", "20"}},
        {"mask_of_batch_where_heads_belong",
         Rank4(
             [](auto& c) {
               c.inputs[Role::kMask] = TensorSpec{DType::kBool, {2, 16, 20}};
             }),
         {"attn_mask", "2", "8"}},
        {"mask_of_batch_where_heads_are_given",
         Rank3WithHeads(
             [](auto& c) {
               c.inputs[Role::kMask] = TensorSpec{DType::kBool, {2, 16, 20}};
             }),
         {"attn_mask", "2", "8"}},
        {"mask_of_heads_where_batch_belongs",
         Rank3WithoutHeads(
             [](auto& c) {
               c.inputs[Role::kMask] = TensorSpec{DType::kBool, {8, 16, 20}};
             }),
         {"attn_mask", "8", "2"}},
        {"lengths_of_another_batch",
         Rank4(
             [](auto& c) {
               c.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {3}};
             }),
         {"nonpad_kv_seqlen", "3", "2"}},
    }),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    HeadCounts, InvalidCallTest,
    ::testing::ValuesIn(std::vector<InvalidCall>{
        {"zero", Rank3WithHeads([](auto& c) { c.q_num_heads = 0; }), {"q_num_heads", "0"}},
        {"negative", Rank3WithHeads([](auto& c) { c.q_num_heads = -8; }), {"q_num_heads", "-8"}},
        {"not_dividing_the_axis",
         Rank3WithHeads([](auto& c) { c.q_num_heads = 7; }),
         {"q_num_heads", "7", "512"}},
        {"huge",
         Rank3WithHeads([](auto& c) { c.q_num_heads = kHuge; }),
         {"q_num_heads", "9223372036854775807"}},
        {"kv_zero", Rank3WithHeads([](auto& c) { c.kv_num_heads = 0; }), {"kv_num_heads", "0"}},
        {"kv_negative",
         Rank3WithHeads([](auto& c) { c.kv_num_heads = -1; }),
         {"kv_num_heads", "-1"}},
        {"kv_not_dividing_the_axis",
         Rank3WithHeads([](auto& c) { c.kv_num_heads = 3; }),
         {"kv_num_heads", "3", "256"}},
        {"kv_not_dividing_the_values",
         Rank3WithHeads([](auto& c) { c.inputs[Role::kV]->shape[2] = 126; }),
         {"kv_num_heads", "4", "126"}},
        {"only_q_num_heads",
         Rank3WithHeads([](auto& c) { c.kv_num_heads.reset(); }),
         {"q_num_heads", "kv_num_heads"}},
        {"only_kv_num_heads",
         Rank3WithHeads([](auto& c) { c.q_num_heads.reset(); }),
         {"q_num_heads", "kv_num_heads"}},
    }),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    Attributes, InvalidCallTest,
    ::testing::ValuesIn(std::vector<InvalidCall>{
        {"softcap_infinite", Rank4([](auto& c) { c.softcap = kInf; }), {"softcap", "inf"}},
        {"dropout_of_all",
         Rank4([](auto& c) {
           c.dropout = Dropout{1.0, 0};
         }),
         {"dropout", "1"}},
        {"dropout_negative",
         Rank4([](auto& c) {
           c.dropout = Dropout{-0.5, 0};
         }),
         {"dropout", "-0.5"}},
        {"dropout_nan",
         Rank4([](auto& c) {
           c.dropout = Dropout{std::nan(""), 0};
         }),
         {"dropout", "nan"}},
    }),
    CaseName);

OperatorCall BackwardOf(std::initializer_list<Role> gradients, const Change& change) {
  return Rank4([&](OperatorCall& c) {
    c.gradients.emplace();
    for (Role role : gradients) c.gradients->Add(role);
    c.inputs[Role::kOutputGradient] = TensorSpec{DType::kFloat32, {2, 8, 16, 32}};
    change(c);
  });
}

TEST(ResolveTest, GradientsHaveTheShapesOfInputs) {
  const ResolvedCall resolved =
      MustResolve(BackwardOf({Role::kDQ, Role::kDV, Role::kDBias}, [](OperatorCall& c) {
        c.inputs[Role::kBias] = TensorSpec{DType::kFloat16, {16, 20}};
        c.inputs[Role::kForwardOutput] = c.inputs[Role::kOutputGradient];
        c.inputs[Role::kForwardLse] = c.inputs[Role::kLseGradient] =
            TensorSpec{DType::kFloat32, {2, 8, 16}};
      }));
  ASSERT_TRUE(resolved.problem.backward.has_value());
  EXPECT_TRUE(resolved.problem.backward->has_forward);
  EXPECT_TRUE(resolved.problem.backward->has_lse_gradient);
  EXPECT_THAT(resolved.outputs[Role::kDQ].shape, ElementsAre(2, 8, 16, 64));
  EXPECT_THAT(resolved.outputs[Role::kDV].shape, ElementsAre(2, 4, 20, 32));
  EXPECT_THAT(resolved.outputs[Role::kDBias].shape, ElementsAre(16, 20));
  EXPECT_EQ(resolved.outputs[Role::kDBias].dtype, DType::kFloat16);
}

INSTANTIATE_TEST_SUITE_P(
    Gradients, InvalidCallTest,
    ::testing::ValuesIn(std::vector<InvalidCall>{
        {"no_output_gradient",
         BackwardOf({Role::kDQ}, [](auto& c) { c.inputs[Role::kOutputGradient].reset(); }),
         {"dY is missing"}},
        {"output_gradient_shape",
         BackwardOf({Role::kDQ}, [](auto& c) { c.inputs[Role::kOutputGradient]->shape[3] = 64; }),
         {"dY is FP32 [2, 8, 16, 64]", "FP32 [2, 8, 16, 32]"}},
        {"output_gradient_type",
         BackwardOf({Role::kDQ},
                    [](auto& c) { c.inputs[Role::kOutputGradient]->dtype = DType::kBFloat16; }),
         {"dY is BF16", "it must be FP32"}},
        {"output_without_lse",
         BackwardOf({Role::kDQ},
                    [](auto& c) {
                      c.inputs[Role::kForwardOutput] = c.inputs[Role::kOutputGradient];
                    }),
         {"Y of the forward pass is set but lse is not"}},
        {"lse_of_a_normalizer_without",
         BackwardOf({Role::kDQ},
                    [](auto& c) {
                      c.normalizer = Normalizer::kSparsemax;
                      c.inputs[Role::kLseGradient] = TensorSpec{DType::kFloat32, {2, 8, 16}};
                    }),
         {"dlse is set, but normalizer is sparsemax"}},
        {"no_gradient", BackwardOf({}, [](auto&) {}), {"no gradient is wanted"}},
        {"gradient_of_nothing",
         BackwardOf({Role::kDHeadSink}, [](auto&) {}),
         {"d_head_sink is wanted, but head_sink is not given"}},
        {"gradient_of_bools",
         BackwardOf({Role::kDMask},
                    [](auto& c) {
                      c.inputs[Role::kMask] = TensorSpec{DType::kBool, {16, 20}};
                    }),
         {"d_attn_mask is wanted, but attn_mask has type BOOL"}},
        {"with_scores",
         BackwardOf({Role::kDQ}, [](auto& c) { c.score_output = ScoreOutput::kWeights; }),
         {"the backward pass returns gradients only"}},
        {"sums_overflow",
         BackwardOf({Role::kDQ},
                    [](auto& c) {
                      c.inputs[Role::kQ]->shape = {1, int64_t{1} << 27, 1, 1};
                      c.inputs[Role::kK]->shape = c.inputs[Role::kV]->shape = {1, 1, 1 << 29, 1};
                      c.inputs[Role::kOutputGradient]->shape = {1, int64_t{1} << 27, 1, 1};
                    }),
         {"sums of gradients by distance overflows"}},
    }),
    CaseName);

INSTANTIATE_TEST_SUITE_P(
    HostileShapes, InvalidCallTest,
    ::testing::ValuesIn(std::vector<InvalidCall>{
        {"q_negative", Rank4([](auto& c) { c.inputs[Role::kQ]->shape[2] = -16; }), {"Q", "-16"}},
        {"k_and_v_negative",
         Rank4([](auto& c) { c.inputs[Role::kK]->shape[2] = c.inputs[Role::kV]->shape[2] = -1; }),
         {"K", "-1"}},
        {"all_batches_negative",
         Rank4([](auto& c) {
           c.inputs[Role::kQ]->shape[0] = c.inputs[Role::kK]->shape[0] =
               c.inputs[Role::kV]->shape[0] = -2;
         }),
         {"Q", "-2"}},
        {"heads_negative", Rank4([](auto& c) { c.inputs[Role::kQ]->shape[1] = -8; }), {"Q", "-8"}},
        {"least",
         Rank4([](auto& c) { c.inputs[Role::kQ]->shape[2] = std::numeric_limits<int64_t>::min(); }),
         {"Q", "-9223372036854775808"}},
        {"mask_negative",
         Rank4([](auto& c) {
           c.inputs[Role::kMask] = TensorSpec{DType::kBool, {-1, 20}};
         }),
         {"attn_mask", "-1"}},
        {"past_negative",
         Rank4([](auto& c) {
           c.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 4, -7, 64}};
           c.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 4, -7, 32}};
         }),
         {"past_key", "-7"}},
        {"lengths_negative",
         Rank4([](auto& c) {
           c.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {-2}};
         }),
         {"nonpad_kv_seqlen", "-2"}},
        {"q_overflows", Rank4([](auto& c) { c.inputs[Role::kQ]->shape[2] = kHuge / 16; }), {"Q"}},
        {"k_overflows",
         Rank4([](auto& c) {
           c.inputs[Role::kK]->shape[2] = c.inputs[Role::kV]->shape[2] = kHuge / 64;
         }),
         {"K"}},
        {"everything_huge",
         Rank4([](auto& c) {
           c.inputs[Role::kQ]->shape = c.inputs[Role::kK]->shape =
               c.inputs[Role::kV]->shape = {kHuge, kHuge, kHuge, kHuge};
         }),
         {"Q"}},
        {"scores_overflow",
         Rank4([](auto& c) {
           c.inputs[Role::kQ]->shape = {1, 1, int64_t{1} << 40, 1};
           c.inputs[Role::kK]->shape = c.inputs[Role::kV]->shape = {1, 1, int64_t{1} << 40, 1};
           c.score_output = ScoreOutput::kScores;
         }),
         {}},
        // With a batch of 0 every product is 0, but the sum is still rejected.
        {"past_and_keys_overflow",
         Rank4([](auto& c) {
           c.inputs[Role::kQ]->shape = {0, 1, 1, 1};
           c.inputs[Role::kK]->shape = c.inputs[Role::kV]->shape = {0, 1, kHuge, 1};
           c.inputs[Role::kPastKey] = c.inputs[Role::kPastValue] =
               TensorSpec{DType::kFloat32, {0, 1, kHuge, 1}};
         }),
         {}},
        {"rank_3_huge_axis",
         Rank3WithHeads([](auto& c) {
           c.inputs[Role::kQ]->shape = {kHuge, kHuge, kHuge - 7};
         }),
         {}},
    }),
    CaseName);

TEST(ByteSizeTest, CountsTheBytesOfARowMajorTensor) {
  EXPECT_EQ(*ByteSize("Q", {DType::kFloat32, {2, 3, 5}}), 120);
  EXPECT_EQ(*ByteSize("Q", {DType::kFloat16, {7}}), 14);
  EXPECT_EQ(*ByteSize("Q", {DType::kBool, {7, 1}}), 7);
  EXPECT_EQ(*ByteSize("Q", {DType::kInt64, {2}}), 16);
  EXPECT_EQ(*ByteSize("Q", {DType::kFloat64, {}}), 8);
  EXPECT_EQ(*ByteSize("Q", {DType::kFloat64, {0, kHuge, kHuge}}), 0);
  EXPECT_EQ(*ByteSize("Q", {DType::kBool, {kHuge}}), kHuge);
}

TEST(ByteSizeTest, RejectsInvalidAndOverflowingShapes) {
  for (const TensorSpec& spec :
       {TensorSpec{DType::kFloat32, {-1}}, TensorSpec{DType::kFloat32, {0, -1}},
        TensorSpec{DType::kFloat16, {kHuge}}, TensorSpec{DType::kBool, {kHuge, 2}},
        TensorSpec{DType::kFloat64, {kHuge / 8 + 1}}}) {
    const absl::Status status = ByteSize("past_key", spec).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << ToString(spec.shape);
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("past_key"), HasSubstr(std::to_string(spec.shape[0]))));
  }
}

TEST(ShapeTest, PrintsLikeAList) {
  EXPECT_EQ(ToString(Shape{2, 8, 128, 64}), "[2, 8, 128, 64]");
  EXPECT_EQ(ToString(Shape{5}), "[5]");
  EXPECT_EQ(ToString(Shape{}), "[]");
}

// Row-major bytes of a caller's tensor, written by the coordinates of its layout.
std::vector<float> Bytes(const Tensor& bhse, Layout layout) {
  const auto& [batch, heads, length, size] = bhse.dims();
  std::vector<float> values(bhse.size());
  for (int64_t b = 0; b < batch; ++b) {
    for (int64_t h = 0; h < heads; ++h) {
      for (int64_t s = 0; s < length; ++s) {
        for (int64_t e = 0; e < size; ++e) {
          const int64_t at = layout == Layout::kBhsd ? ((b * heads + h) * length + s) * size + e
                                                     : ((b * length + s) * heads + h) * size + e;
          values[at] = static_cast<float>(bhse.At(b, h, s, e));
        }
      }
    }
  }
  return values;
}

const std::byte* AsBytes(const std::vector<float>& values) {
  return reinterpret_cast<const std::byte*>(values.data());
}
std::byte* AsBytes(std::vector<float>& values) {
  return reinterpret_cast<std::byte*>(values.data());
}

// The same tensors in each layout give the same numbers, and outputs have the same layout.
TEST(ResolvedCallTest, ViewsReadAndWriteEveryLayout) {
  Problem problem{.batch = 2,
                  .query_heads = 4,
                  .kv_heads = 2,
                  .query_length = 5,
                  .key_length = 7,
                  .past_length = 3,
                  .head_size = 8,
                  .value_head_size = 6,
                  .mask = MaskShape{DType::kFloat32, {1, 4, 5, 10}},
                  .score_output = ScoreOutput::kWeights,
                  .wants_lse = true,
                  .wants_present = true};
  Rng rng(3);
  const Inputs inputs = RandomInputs(problem, rng);
  const Expected expected = Attend(problem, inputs);
  for (const Layout layout : {Layout::kBhsd, Layout::kBshd, Layout::kBse}) {
    OperatorCall call;
    call.layout = layout;
    if (layout == Layout::kBhsd) {
      call.inputs[Role::kQ] = TensorSpec{DType::kFloat32, {2, 4, 5, 8}};
      call.inputs[Role::kK] = TensorSpec{DType::kFloat32, {2, 2, 7, 8}};
      call.inputs[Role::kV] = TensorSpec{DType::kFloat32, {2, 2, 7, 6}};
    } else if (layout == Layout::kBshd) {
      call.inputs[Role::kQ] = TensorSpec{DType::kFloat32, {2, 5, 4, 8}};
      call.inputs[Role::kK] = TensorSpec{DType::kFloat32, {2, 7, 2, 8}};
      call.inputs[Role::kV] = TensorSpec{DType::kFloat32, {2, 7, 2, 6}};
    } else {
      call.inputs[Role::kQ] = TensorSpec{DType::kFloat32, {2, 5, 4 * 8}};
      call.inputs[Role::kK] = TensorSpec{DType::kFloat32, {2, 7, 2 * 8}};
      call.inputs[Role::kV] = TensorSpec{DType::kFloat32, {2, 7, 2 * 6}};
      call.q_num_heads = 4;
      call.kv_num_heads = 2;
    }
    call.inputs[Role::kMask] = TensorSpec{DType::kFloat32, {4, 5, 10}};
    call.inputs[Role::kPastKey] = TensorSpec{DType::kFloat32, {2, 2, 3, 8}};
    call.inputs[Role::kPastValue] = TensorSpec{DType::kFloat32, {2, 2, 3, 6}};
    call.wants_lse = call.wants_present = true;
    call.score_output = ScoreOutput::kWeights;
    const ResolvedCall resolved = MustResolve(call);

    const std::vector<float> q = Bytes(inputs.query, layout), k = Bytes(inputs.key, layout),
                             v = Bytes(inputs.value, layout),
                             mask = Bytes(*inputs.mask, Layout::kBhsd),
                             past_key = Bytes(*inputs.past_key, Layout::kBhsd),
                             past_value = Bytes(*inputs.past_value, Layout::kBhsd);
    std::vector<float> y(expected.output.size()), lse(expected.lse.size()),
        scores(expected.scores.size()), present_key(expected.present_key.size()),
        present_value(expected.present_value.size());
    Arguments arguments;
    arguments.inputs[Role::kQ] = resolved.Input(Role::kQ, AsBytes(q));
    arguments.inputs[Role::kK] = resolved.Input(Role::kK, AsBytes(k));
    arguments.inputs[Role::kV] = resolved.Input(Role::kV, AsBytes(v));
    arguments.inputs[Role::kMask] = resolved.Input(Role::kMask, AsBytes(mask));
    arguments.inputs[Role::kPastKey] = resolved.Input(Role::kPastKey, AsBytes(past_key));
    arguments.inputs[Role::kPastValue] = resolved.Input(Role::kPastValue, AsBytes(past_value));
    arguments.outputs[Role::kY] = resolved.Output(Role::kY, AsBytes(y));
    arguments.outputs[Role::kLse] = resolved.Output(Role::kLse, AsBytes(lse));
    arguments.outputs[Role::kScores] = resolved.Output(Role::kScores, AsBytes(scores));
    arguments.outputs[Role::kPresentKey] = resolved.Output(Role::kPresentKey, AsBytes(present_key));
    arguments.outputs[Role::kPresentValue] =
        resolved.Output(Role::kPresentValue, AsBytes(present_value));

    const absl::StatusOr<Plan> plan = MakePlan(resolved.problem, {});
    ASSERT_TRUE(plan.ok()) << plan.status();
    AlignedBuffer workspace(plan->workspace_bytes());
    ThreadPool pool(1);
    const absl::Status status = rapt::Run(*plan, arguments, workspace.span(), pool);
    ASSERT_TRUE(status.ok()) << status;

    Tensor want(DType::kFloat32, {2, 4, 5, 6});
    for (int64_t n = 0, b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t s = 0; s < 5; ++s) {
          for (int64_t e = 0; e < 6; ++e) want.Set(b, h, s, e, expected.output[n++]);
        }
      }
    }
    const auto near = [](const std::vector<float>& got, const auto& wanted) {
      ASSERT_EQ(got.size(), wanted.size());
      for (size_t n = 0; n < got.size(); ++n) ASSERT_NEAR(got[n], wanted[n], 4e-6) << "at " << n;
    };
    SCOPED_TRACE("layout " + std::to_string(static_cast<int>(layout)));
    near(y, Bytes(want, layout));
    near(lse, expected.lse);
    near(scores, expected.scores);
    near(present_key, expected.present_key);
    near(present_value, expected.present_value);
  }
}

}  // namespace
}  // namespace rapt::test
