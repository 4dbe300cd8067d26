#include "attention/problem.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/oracle.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kHuge = std::numeric_limits<int64_t>::max();
constexpr double kInf = std::numeric_limits<double>::infinity();

Problem Valid(const std::function<void(Problem&)>& change = [](Problem&) {}) {
  Problem problem{.batch = 2,
                  .query_heads = 8,
                  .kv_heads = 4,
                  .query_length = 5,
                  .key_length = 7,
                  .head_size = 16,
                  .value_head_size = 12};
  change(problem);
  return problem;
}

TEST(ProblemTest, DerivedSizes) {
  Problem problem = Valid([](Problem& p) { p.past_length = 3; });
  EXPECT_EQ(problem.total_keys(), 10);
  EXPECT_EQ(problem.group_size(), 2);
  EXPECT_EQ(problem.effective_scale(), 0.25);
  EXPECT_EQ(problem.accumulator(), DType::kFloat32);
  EXPECT_FALSE(problem.empty());
  problem.softmax_in_fp64 = true;
  EXPECT_EQ(problem.accumulator(), DType::kFloat64);
  EXPECT_EQ(problem.lse_dtype(), DType::kFloat32);
  EXPECT_TRUE(Valid([](Problem& p) { p.batch = 0; }).empty());
  EXPECT_TRUE(Valid([](Problem& p) { p.query_length = 0; }).empty());
  EXPECT_TRUE(Valid([](Problem& p) { p.query_heads = 0; }).empty());
  EXPECT_FALSE(Valid([](Problem& p) { p.key_length = 0; }).empty());
}

TEST(ValidateTest, AcceptsValidProblems) {
  for (const Problem& problem : {
           Valid(),
           Valid([](Problem& p) { p.batch = 0; }),
           Valid([](Problem& p) { p.query_heads = 0; }),
           Valid([](Problem& p) { p.query_heads = p.kv_heads = 0; }),
           Valid([](Problem& p) { p.query_length = 0; }),
           Valid([](Problem& p) { p.key_length = 0; }),
           Valid([](Problem& p) { p.scale = -1e30; }),
           Valid([](Problem& p) { p.scale = 0; }),
           Valid([](Problem& p) { p.left_window = p.right_window = kHuge; }),
           Valid([](Problem& p) {
             p.mask = MaskShape{DType::kFloat16, {2, 8, 5, 3}};
           }),
           Valid([](Problem& p) {
             p.dropout = Dropout{0, 0};
           }),
           Valid([](Problem& p) {
             p.dropout = Dropout{0.999999, 0};
           }),
       }) {
    EXPECT_TRUE(Validate(problem).ok()) << Validate(problem);
  }
}

struct Invalid {
  const char* name;
  std::function<void(Problem&)> change;
  std::vector<std::string> words;
};

void PrintTo(const Invalid& invalid, std::ostream* out) { *out << invalid.name; }

class InvalidProblemTest : public ::testing::TestWithParam<Invalid> {};

TEST_P(InvalidProblemTest, IsRejectedWithTheFieldAndTheValue) {
  const absl::Status status = Validate(Valid(GetParam().change));
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const std::string& word : GetParam().words) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(word));
  }
}

INSTANTIATE_TEST_SUITE_P(
    Fields, InvalidProblemTest,
    ::testing::ValuesIn(std::vector<Invalid>{
        {"bool_inputs", [](Problem& p) { p.dtype = DType::kBool; }, {"BOOL"}},
        {"int_inputs", [](Problem& p) { p.dtype = DType::kInt64; }, {"INT64"}},
        {"batch", [](Problem& p) { p.batch = -1; }, {"batch", "-1"}},
        {"query_heads", [](Problem& p) { p.query_heads = -8; }, {"-8"}},
        {"kv_heads", [](Problem& p) { p.kv_heads = -4; }, {"-4"}},
        {"query_length", [](Problem& p) { p.query_length = -5; }, {"-5"}},
        {"key_length", [](Problem& p) { p.key_length = -7; }, {"-7"}},
        {"past_length", [](Problem& p) { p.past_length = -1; }, {"-1"}},
        {"head_size_0", [](Problem& p) { p.head_size = 0; }, {"0"}},
        {"head_size_negative", [](Problem& p) { p.head_size = -16; }, {"-16"}},
        {"value_head_size_0", [](Problem& p) { p.value_head_size = 0; }, {"0"}},
        {"no_kv_heads", [](Problem& p) { p.kv_heads = 0; }, {"key/value heads", "0", "1"}},
        {"heads_do_not_divide", [](Problem& p) { p.kv_heads = 3; }, {"8", "3"}},
        {"scale_nan", [](Problem& p) { p.scale = std::nan(""); }, {"scale", "nan"}},
        {"scale_infinite", [](Problem& p) { p.scale = kInf; }, {"scale", "inf"}},
        {"softcap_negative", [](Problem& p) { p.softcap = -2; }, {"softcap", "-2"}},
        {"softcap_nan", [](Problem& p) { p.softcap = std::nan(""); }, {"softcap", "nan"}},
        {"left_window", [](Problem& p) { p.left_window = -3; }, {"left_window", "-3"}},
        {"right_window", [](Problem& p) { p.right_window = -2; }, {"right_window", "-2"}},
        {"dropout",
         [](Problem& p) {
           p.dropout = Dropout{1, 0};
         },
         {"dropout", "1"}},
        {"mask_type",
         [](Problem& p) {
           p.mask = MaskShape{DType::kInt64, {1, 1, 5, 7}};
         },
         {"mask", "INT64"}},
        {"mask_batch",
         [](Problem& p) {
           p.mask = MaskShape{DType::kBool, {3, 1, 5, 7}};
         },
         {"mask", "3", "2"}},
        {"mask_heads",
         [](Problem& p) {
           p.mask = MaskShape{DType::kBool, {1, 4, 5, 7}};
         },
         {"mask", "4", "8"}},
        {"mask_queries",
         [](Problem& p) {
           p.mask = MaskShape{DType::kBool, {1, 1, 4, 7}};
         },
         {"mask", "4", "5"}},
        {"mask_keys",
         [](Problem& p) {
           p.mask = MaskShape{DType::kBool, {1, 1, 5, 8}};
         },
         {"mask", "8", "7"}},
        {"mask_negative",
         [](Problem& p) {
           p.mask = MaskShape{DType::kBool, {1, 1, -5, 7}};
         },
         {"mask", "-5"}},
    }),
    [](const auto& info) { return std::string(info.param.name); });

INSTANTIATE_TEST_SUITE_P(
    Overflows, InvalidProblemTest,
    ::testing::ValuesIn(std::vector<Invalid>{
        {"queries", [](Problem& p) { p.query_length = kHuge / 4; }, {}},
        {"keys", [](Problem& p) { p.key_length = kHuge / 4; }, {}},
        {"past_and_keys",
         [](Problem& p) {
           p.past_length = kHuge;
           p.key_length = kHuge;
         },
         {}},
        {"past_and_keys_of_no_batch",
         [](Problem& p) {
           p.batch = 0;
           p.past_length = kHuge;
           p.key_length = kHuge;
         },
         {}},
        {"values", [](Problem& p) { p.value_head_size = kHuge / 8; }, {}},
        {"head_size", [](Problem& p) { p.head_size = kHuge; }, {}},
        {"scores",
         [](Problem& p) {
           p.query_length = p.key_length = int64_t{1} << 32;
           p.score_output = ScoreOutput::kScores;
         },
         {}},
        {"heads_of_no_batch",
         [](Problem& p) {
           p.batch = 0;
           p.query_heads = p.kv_heads = kHuge;
           p.query_length = kHuge;
         },
         {}},
        {"bias_table",
         [](Problem& p) {
           p.query_heads = p.kv_heads = 1 << 20;
           p.bias_table = BiasTable{DType::kFloat32, kMaxAxis};
           p.max_distance = kMaxAxis;
         },
         {"the size of bias_table overflows 64 bits"}},
        {"relative_bias",
         [](Problem& p) {
           p.query_heads = p.kv_heads = 1 << 20;
           p.relative_bias = RelativeBias{DType::kFloat32, 1 << 20, kMaxAxis - 1};
         },
         {"the size of relative_bias overflows 64 bits"}},
    }),
    [](const auto& info) { return std::string(info.param.name); });

// Arguments with every tensor, for a problem that uses all of them.
class ArgumentsTest : public ::testing::Test {
 protected:
  ArgumentsTest() {
    problem_.past_length = 3;
    problem_.mask = MaskShape{DType::kBool, {2, 1, 5, 10}};
    problem_.has_key_lengths = problem_.wants_lse = problem_.wants_present = true;
    problem_.score_output = ScoreOutput::kWeights;
    arguments_.inputs[Role::kQ] = query_.View();
    arguments_.inputs[Role::kK] = key_.View();
    arguments_.inputs[Role::kV] = value_.View();
    arguments_.inputs[Role::kMask] = mask_.View();
    arguments_.inputs[Role::kPastKey] = past_key_.View();
    arguments_.inputs[Role::kPastValue] = past_value_.View();
    arguments_.key_lengths = key_lengths_;
    arguments_.outputs[Role::kY] = output_.MutableView();
    arguments_.outputs[Role::kLse] = lse_.MutableView();
    arguments_.outputs[Role::kScores] = scores_.MutableView();
    arguments_.outputs[Role::kPresentKey] = present_key_.MutableView();
    arguments_.outputs[Role::kPresentValue] = present_value_.MutableView();
  }

  void ExpectRejected(const std::vector<std::string>& words) {
    const absl::Status status = Validate(problem_, arguments_);
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    for (const std::string& word : words) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(word));
    }
  }

  Problem problem_ = Valid();
  Arguments arguments_;
  std::vector<int64_t> key_lengths_ = {0, 7};
  Tensor query_{DType::kFloat32, {2, 8, 5, 16}};
  Tensor key_{DType::kFloat32, {2, 4, 7, 16}};
  Tensor value_{DType::kFloat32, {2, 4, 7, 12}};
  Tensor mask_{DType::kBool, {2, 1, 5, 10}};
  Tensor past_key_{DType::kFloat32, {2, 4, 3, 16}};
  Tensor past_value_{DType::kFloat32, {2, 4, 3, 12}};
  Tensor output_{DType::kFloat32, {2, 8, 5, 12}};
  Tensor lse_{DType::kFloat32, {2, 8, 5, 1}};
  Tensor scores_{DType::kFloat32, {2, 8, 5, 10}};
  Tensor present_key_{DType::kFloat32, {2, 4, 10, 16}};
  Tensor present_value_{DType::kFloat32, {2, 4, 10, 12}};
};

TEST_F(ArgumentsTest, CompleteArgumentsAreValid) {
  const absl::Status status = Validate(problem_, arguments_);
  EXPECT_TRUE(status.ok()) << status;
}

TEST_F(ArgumentsTest, KeyLengthsOutOfRangeAreRejectedWithTheLimit) {
  key_lengths_[1] = 8;
  ExpectRejected({"nonpad_kv_seqlen", "8", "7"});
  key_lengths_[1] = -1;
  ExpectRejected({"nonpad_kv_seqlen", "-1", "7"});
  key_lengths_[1] = kHuge;
  ExpectRejected({"nonpad_kv_seqlen"});
  key_lengths_[1] = std::numeric_limits<int64_t>::min();
  ExpectRejected({"nonpad_kv_seqlen"});
}

TEST_F(ArgumentsTest, KeyLengthsMustHaveOneElementPerBatchRow) {
  arguments_.key_lengths = absl::MakeConstSpan(key_lengths_).first(1);
  ExpectRejected({"nonpad_kv_seqlen", "1", "2"});
  arguments_.key_lengths = {};
  ExpectRejected({"nonpad_kv_seqlen", "0", "2"});
}

TEST_F(ArgumentsTest, EveryTensorOfTheProblemMustBePresent) {
  const auto without = [&](auto& view, const char* name) {
    SCOPED_TRACE(name);
    const auto kept = view;
    view = {};
    ExpectRejected({name});
    view = kept;
  };
  without(arguments_.inputs[Role::kQ], "Q");
  without(arguments_.inputs[Role::kK], "K");
  without(arguments_.inputs[Role::kV], "V");
  without(arguments_.inputs[Role::kMask], "attn_mask");
  without(arguments_.inputs[Role::kPastKey], "past_key");
  without(arguments_.inputs[Role::kPastValue], "past_value");
  without(arguments_.outputs[Role::kY], "Y");
  without(arguments_.outputs[Role::kLse], "lse");
  without(arguments_.outputs[Role::kScores], "qk_matmul_output");
  without(arguments_.outputs[Role::kPresentKey], "present_key");
  without(arguments_.outputs[Role::kPresentValue], "present_value");
  EXPECT_TRUE(Validate(problem_, arguments_).ok());
}

TEST_F(ArgumentsTest, TensorsHaveTheDimsAndTheTypeOfTheProblem) {
  arguments_.inputs[Role::kK].dims[2] = 6;
  ExpectRejected({"K", "6", "7"});
  arguments_.inputs[Role::kK].dims[2] = 7;
  arguments_.outputs[Role::kScores].dims[3] = 11;
  ExpectRejected({"11", "10"});
  arguments_.outputs[Role::kScores].dims[3] = 10;
  arguments_.inputs[Role::kV].dtype = DType::kFloat16;
  ExpectRejected({"V", "FP16", "FP32"});
  arguments_.inputs[Role::kV].dtype = DType::kFloat32;
  arguments_.outputs[Role::kLse].dtype = DType::kFloat64;
  ExpectRejected({"lse", "FP64", "FP32"});
}

TEST_F(ArgumentsTest, RowsAreContiguousExceptTheMasks) {
  arguments_.inputs[Role::kQ].strides[3] = 2;
  ExpectRejected({"Q", "2", "1"});
  arguments_.inputs[Role::kQ].strides[3] = 1;
  arguments_.inputs[Role::kMask].strides[3] = 5;
  EXPECT_TRUE(Validate(problem_, arguments_).ok());
}

TEST_F(ArgumentsTest, UnusedTensorsMayBeAbsent) {
  problem_ = Valid();
  Arguments least;
  least.inputs[Role::kQ] = arguments_.inputs[Role::kQ];
  least.inputs[Role::kK] = arguments_.inputs[Role::kK];
  least.inputs[Role::kV] = arguments_.inputs[Role::kV];
  least.outputs[Role::kY] = arguments_.outputs[Role::kY];
  EXPECT_TRUE(Validate(problem_, least).ok()) << Validate(problem_, least);
}

// Compares with the definition, key by key, for all small combinations of what hides keys by
// position.
TEST(VisibleKeysTest, MatchTheDefinition) {
  int64_t checked = 0;
  const auto check = [&](const Problem& problem, const std::vector<int64_t>& lengths) {
    for (int64_t i = 0; i < problem.query_length; ++i) {
      const KeyRange range = VisibleKeys(problem, lengths, 0, i);
      ASSERT_LE(0, range.begin);
      ASSERT_LE(range.begin, range.end);
      ASSERT_LE(range.end, problem.total_keys());
      for (int64_t j = 0; j < problem.total_keys(); ++j) {
        const bool visible = range.begin <= j && j < range.end;
        ASSERT_EQ(visible, IsVisible(problem, lengths, 0, i, j))
            << "Sq=" << problem.query_length << " Sk=" << problem.key_length
            << " P=" << problem.past_length << " causal=" << problem.causal
            << " alignment=" << static_cast<int>(problem.alignment)
            << " left=" << problem.left_window << " right=" << problem.right_window
            << " length=" << (lengths.empty() ? -1 : lengths[0]) << " i=" << i << " j=" << j;
        ++checked;
      }
    }
  };
  Problem p{.batch = 1, .query_heads = 1, .kv_heads = 1, .head_size = 1, .value_head_size = 1};
  for (p.query_length = 1; p.query_length <= 4; ++p.query_length) {
    for (p.key_length = 0; p.key_length <= 4; ++p.key_length) {
      for (const int64_t past : {0, 1, 3}) {
        p.past_length = past;
        for (const bool causal : {false, true}) {
          p.causal = causal;
          for (const Alignment alignment :
               {Alignment::kTopLeft, Alignment::kBottomRight, Alignment::kOnnx}) {
            p.alignment = alignment;
            for (p.left_window = -1; p.left_window <= 3; ++p.left_window) {
              for (p.right_window = -1; p.right_window <= 3; ++p.right_window) {
                p.has_key_lengths = false;
                ASSERT_NO_FATAL_FAILURE(check(p, {}));
                p.has_key_lengths = true;
                for (int64_t length = 0; length <= p.key_length; ++length) {
                  ASSERT_NO_FATAL_FAILURE(check(p, {length}));
                }
              }
            }
          }
        }
      }
    }
  }
  EXPECT_GT(checked, 100000);
}

TEST(VisibleKeysTest, WindowsOfAnySizeDoNotOverflow) {
  Problem p = Valid([](Problem& q) { q.left_window = q.right_window = kHuge; });
  const KeyRange all = VisibleKeys(p, {}, 0, 4);
  EXPECT_EQ(all.begin, 0);
  EXPECT_EQ(all.end, 7);
}

TEST(VisibleKeysTest, EachBatchRowHasItsOwnLength) {
  const Problem p = Valid([](Problem& q) { q.has_key_lengths = true; });
  EXPECT_EQ(VisibleKeys(p, {2, 6}, 0, 0).end, 2);
  EXPECT_EQ(VisibleKeys(p, {2, 6}, 1, 0).end, 6);
}

}  // namespace
}  // namespace rapt::test
