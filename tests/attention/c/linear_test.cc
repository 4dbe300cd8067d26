// Linear attention through the C interface, compared with the operator in C++.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "attention/mechanism/linear/linear_attention.h"
#include "rapt/attention.h"
#include "tests/attention/c/c_plan_test.h"
#include "tests/support/run_operator.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

class CLinearTest : public CPlanTest<rapt_linear_problem, rapt_linear_arguments> {
 protected:
  CLinearTest() : CPlanTest(rapt_linear_plan_create, rapt_linear_run) {}
};

constexpr int64_t kBatch = 2, kTokens = 9, kHeads = 2, kQueryHeads = 4, kKeySize = 5,
                  kValueSize = 7;

rapt_linear_problem SmallProblem(int32_t rule) {
  return {.struct_size = sizeof(rapt_linear_problem),
          .dtype = RAPT_FP32,
          .update_rule = rule,
          .batch = kBatch,
          .query_heads = kQueryHeads,
          .kv_heads = kHeads,
          .tokens = kTokens,
          .key_size = kKeySize,
          .value_size = kValueSize};
}

LinearAttentionCall SmallCall(UpdateRule rule) {
  LinearAttentionCall call;
  call.update_rule = rule;
  call.q_num_heads = kQueryHeads;
  call.kv_num_heads = kHeads;
  call.wants_present_state = true;
  return call;
}

// Random tensors and the operator's answers.
class Call {
 public:
  explicit Call(LinearAttentionCall call) : call_(std::move(call)) {
    Add(Role::kQ, {kBatch, kTokens, kQueryHeads * kKeySize}, -1, 1);
    Add(Role::kK, {kBatch, kTokens, kHeads * kKeySize}, -0.4, 0.4);
    Add(Role::kV, {kBatch, kTokens, kHeads * kValueSize}, -1, 1);
  }

  void Add(Role role, const Shape& shape, double low, double high) {
    call_.inputs[role] = TensorSpec{DType::kFloat32, shape};
    inputs_[role] = TensorOf(shape);
    inputs_[role]->FillUniform(rng_, low, high);
  }
  void SetLengths(std::vector<int64_t> lengths) {
    call_.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {kBatch}};
    lengths_ = std::move(lengths);
  }

  // Computes the answers and sets the pointers to tensors of the same sizes.
  rapt_linear_arguments Expect() {
    const auto op = MakeLinearAttention(call_).value();
    Arguments arguments;
    arguments.key_lengths = lengths_;
    for (Role role : kInputs) {
      if (inputs_[role]) arguments.inputs[role] = inputs_[role]->View();
    }
    for (Role role : kOutputs) {
      if (!op->outputs()[role]) continue;
      want_[role] = TensorOf(op->outputs()[role]->shape);
      got_[role] = TensorOf(op->outputs()[role]->shape);
      arguments.outputs[role] = want_[role]->MutableView();
    }
    RunOperator(*op, arguments, {.threads = 2});
    const auto in = [&](Role role) { return inputs_[role] ? inputs_[role]->View().data : nullptr; };
    const auto out = [&](Role role) {
      return got_[role] ? got_[role]->MutableView().data : nullptr;
    };
    return {.struct_size = sizeof(rapt_linear_arguments),
            .query = in(Role::kQ),
            .key = in(Role::kK),
            .value = in(Role::kV),
            .past_state = in(linear::kPastState),
            .past_normalizer = in(linear::kPastNormalizer),
            .decay = in(linear::kDecay),
            .beta = in(linear::kBeta),
            .projection = in(linear::kProjection),
            .key_lengths = lengths_.data(),
            .output = out(Role::kY),
            .present_state = out(linear::kPresentState),
            .present_normalizer = out(linear::kPresentNormalizer),
            .relative_error = reinterpret_cast<float*>(out(linear::kRelativeError))};
  }

  void ExpectEqual() const {
    for (Role role : kOutputs) {
      if (!want_[role]) continue;
      EXPECT_TRUE(SameBits(std::string(linear::NameOf(role)), *got_[role], *want_[role]));
    }
  }

 private:
  static Tensor TensorOf(const Shape& shape) {
    int64_t size = 1;
    for (int64_t axis : shape) size *= axis;
    return {DType::kFloat32, {1, 1, 1, size}};
  }

  LinearAttentionCall call_;
  Rng rng_{1};
  InputMap<std::optional<Tensor>> inputs_;
  std::vector<int64_t> lengths_;
  OutputMap<std::optional<Tensor>> want_, got_;
};

TEST_F(CLinearTest, ComputesTheGatedDeltaRule) {
  for (const bool per_key : {false, true}) {
    Call call(SmallCall(UpdateRule::kGatedDelta));
    call.Add(linear::kDecay, {kBatch, kTokens, kHeads * (per_key ? kKeySize : 1)}, -1, 0);
    call.Add(linear::kBeta, {kBatch, kTokens, 1}, 0, 1);
    call.Add(linear::kPastState, {kBatch, kHeads, kKeySize, kValueSize}, -1, 1);
    call.SetLengths({3, 9});
    rapt_linear_problem problem = SmallProblem(RAPT_GATED_DELTA);
    problem.decay_dtype = problem.beta_dtype = problem.past_dtype = RAPT_FP32;
    problem.has_key_decays = per_key ? 1 : 0;
    problem.has_one_beta = problem.wants_present_state = problem.has_key_lengths = 1;
    ASSERT_EQ(Create(problem), RAPT_OK) << message_;
    ASSERT_EQ(Run(call.Expect()), RAPT_OK) << message_;
    call.ExpectEqual();
  }
}

TEST_F(CLinearTest, ComputesEachRule) {
  constexpr std::pair<int32_t, UpdateRule> kRules[] = {{RAPT_LINEAR, UpdateRule::kLinear},
                                                       {RAPT_GATED, UpdateRule::kGated},
                                                       {RAPT_DELTA, UpdateRule::kDelta}};
  for (const auto& [theirs, ours] : kRules) {
    LinearAttentionCall operator_call = SmallCall(ours);
    operator_call.scale = 0.3;
    operator_call.chunk_size = 4;
    Call call(operator_call);
    rapt_linear_problem problem = SmallProblem(theirs);
    problem.scale = 0.3;
    problem.chunk_size = 4;
    problem.wants_present_state = 1;
    if (ours == UpdateRule::kGated) {
      call.Add(linear::kDecay, {kBatch, kTokens, kHeads}, -1, 0);
      problem.decay_dtype = RAPT_FP32;
    }
    if (ours == UpdateRule::kDelta) {
      call.Add(linear::kBeta, {kBatch, kTokens, kHeads}, 0, 1);
      problem.beta_dtype = RAPT_FP32;
    }
    ASSERT_EQ(Create(problem), RAPT_OK) << message_;
    ASSERT_EQ(Run(call.Expect()), RAPT_OK) << message_;
    call.ExpectEqual();
  }
}

TEST_F(CLinearTest, ComputesFavor) {
  for (const bool is_drawn : {false, true}) {
    LinearAttentionCall operator_call = SmallCall(UpdateRule::kLinear);
    operator_call.feature_map = FeatureMap::kFavor;
    operator_call.num_features = 6;
    operator_call.is_causal = false;
    operator_call.wants_present_normalizer = true;
    if (is_drawn) {
      operator_call.seed = 4;
      operator_call.error_rows = 10;
    }
    Call call(operator_call);
    rapt_linear_problem problem = SmallProblem(RAPT_LINEAR);
    problem.feature_map = RAPT_FAVOR;
    problem.num_features = 6;
    problem.bidirectional = problem.wants_present_state = problem.wants_present_normalizer = 1;
    if (is_drawn) {
      problem.seed = 4;
      problem.error_rows = 10;
    } else {
      call.Add(linear::kProjection, {6, kKeySize}, -2, 2);
      call.Add(linear::kPastState, {kBatch, kHeads, 6, kValueSize}, 0, 1);
      call.Add(linear::kPastNormalizer, {kBatch, kHeads, 6}, 1, 2);
      problem.projection_dtype = problem.past_dtype = RAPT_FP32;
    }
    ASSERT_EQ(Create(problem), RAPT_OK) << message_;
    ASSERT_EQ(Run(call.Expect()), RAPT_OK) << message_;
    call.ExpectEqual();
  }
}

TEST_F(CLinearTest, NormalizesElu) {
  LinearAttentionCall operator_call = SmallCall(UpdateRule::kLinear);
  operator_call.feature_map = FeatureMap::kElu1;
  operator_call.normalize = true;
  Call call(operator_call);
  rapt_linear_problem problem = SmallProblem(RAPT_LINEAR);
  problem.feature_map = RAPT_ELU1;
  problem.normalize = problem.wants_present_state = 1;
  ASSERT_EQ(Create(problem), RAPT_OK) << message_;
  ASSERT_EQ(Run(call.Expect()), RAPT_OK) << message_;
  call.ExpectEqual();
}

TEST_F(CLinearTest, NamesTheInvalidField) {
  struct {
    const char* message;
    void (*change)(rapt_linear_problem&);
  } const kCases[] = {
      {"dtype is 5; it must be from 1 to 4", [](rapt_linear_problem& p) { p.dtype = RAPT_BOOL; }},
      {"update_rule is 4; it must be from 0 to 3",
       [](rapt_linear_problem& p) { p.update_rule = 4; }},
      {"batch is -1", [](rapt_linear_problem& p) { p.batch = -1; }},
      {"query_heads is 3; it must be a multiple of kv_heads, 2",
       [](rapt_linear_problem& p) { p.query_heads = 3; }},
      {"kv_heads is 0", [](rapt_linear_problem& p) { p.kv_heads = 0; }},
      {"tokens is -3", [](rapt_linear_problem& p) { p.tokens = -3; }},
      {"key_size is 65537", [](rapt_linear_problem& p) { p.key_size = 65537; }},
      {"value_size is 0", [](rapt_linear_problem& p) { p.value_size = 0; }},
      {"decay is given; update_rule is linear",
       [](rapt_linear_problem& p) { p.decay_dtype = RAPT_FP32; }},
      {"beta_dtype is 9", [](rapt_linear_problem& p) { p.beta_dtype = 9; }},
      {"past_dtype is 5", [](rapt_linear_problem& p) { p.past_dtype = RAPT_BOOL; }},
      {"feature_map is 4", [](rapt_linear_problem& p) { p.feature_map = 4; }},
      {"reserved is 1", [](rapt_linear_problem& p) { p.reserved = 1; }},
      {"num_features is given; it needs feature_map favor",
       [](rapt_linear_problem& p) { p.num_features = 3; }},
      {"chunk_size is -1", [](rapt_linear_problem& p) { p.chunk_size = -1; }},
  };
  for (const auto& c : kCases) {
    rapt_linear_problem problem = SmallProblem(RAPT_LINEAR);
    c.change(problem);
    EXPECT_THAT(ErrorOf(problem), HasSubstr(c.message));
  }
}

TEST_F(CLinearTest, NamesTheMissingTensor) {
  Call call(SmallCall(UpdateRule::kLinear));
  rapt_linear_problem problem = SmallProblem(RAPT_LINEAR);
  problem.wants_present_state = 1;
  ASSERT_EQ(Create(problem), RAPT_OK) << message_;
  const rapt_linear_arguments all = call.Expect();
  rapt_linear_arguments arguments = all;
  arguments.key = nullptr;
  EXPECT_EQ(Run(arguments), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "key is null");
  arguments = all;
  arguments.present_state = nullptr;
  EXPECT_EQ(Run(arguments), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "present_state is null");
}

TEST_F(CLinearTest, NamesALengthThatIsOutOfRange) {
  Call call(SmallCall(UpdateRule::kLinear));
  rapt_linear_problem problem = SmallProblem(RAPT_LINEAR);
  problem.wants_present_state = problem.has_key_lengths = 1;
  ASSERT_EQ(Create(problem), RAPT_OK) << message_;
  rapt_linear_arguments arguments = call.Expect();
  const int64_t lengths[] = {1, 10};
  arguments.key_lengths = lengths;
  EXPECT_EQ(Run(arguments), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "nonpad_kv_seqlen[1] is 10; it must be from 0 to the length 9");
}

TEST_F(CLinearTest, APlanIsRunByItsOwnFunction) {
  ASSERT_EQ(Create(SmallProblem(RAPT_LINEAR)), RAPT_OK) << message_;
  EXPECT_EQ(ErrorOfAttention(), "plan is of linear attention; rapt_linear_run runs it");
  CreateOfAttention();
  EXPECT_EQ(Run({.struct_size = sizeof(rapt_linear_arguments)}), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "plan is of attention; rapt_run runs it");
}

}  // namespace
}  // namespace rapt::test
