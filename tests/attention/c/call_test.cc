// Operators by their names through the C interface, compared with the operators in C++.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "attention/operator_schema.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "rapt/attention.h"
#include "tests/attention/c/c_type.h"
#include "tests/support/operator_cases.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

using Input = CaseInput;
using Case = OperatorCase;

// B 2, T 9, Hq 4, Hkv 2, d_k 5, d_v 7.
Case Linear(std::vector<Input> inputs = {},
            std::vector<std::pair<std::string, std::string>> attributes = {},
            std::vector<std::string> wants = {}) {
  Case c{"linear_attention",
         {{"query", {2, 9, 20}}, {"key", {2, 9, 10}}, {"value", {2, 9, 14}}},
         {{"q_num_heads", "4"}, {"kv_num_heads", "2"}, {"update_rule", "linear"}},
         std::move(wants)};
  c.inputs.insert(c.inputs.end(), inputs.begin(), inputs.end());
  c.attributes.insert(c.attributes.end(), attributes.begin(), attributes.end());
  return c;
}

// The outputs by the operator in C++.
CaseTensors Expected(const Case& c) { return Compute(c, InputsOf(c)).value(); }

std::vector<rapt_tensor> PointersTo(CaseTensors& tensors) {
  std::vector<rapt_tensor> pointers;
  for (auto& [name, tensor] : tensors) pointers.push_back({name.c_str(), tensor.bytes.data()});
  return pointers;
}

class CCallTest : public ::testing::Test, public CaseInterface {
 protected:
  CCallTest() {
    const rapt_context_options options = {.struct_size = sizeof(options), .threads = 2};
    EXPECT_EQ(rapt_context_create(&options, &context_, message_, sizeof(message_)), RAPT_OK);
  }
  ~CCallTest() override {
    rapt_call_destroy(call_);
    rapt_plan_destroy(plan_);
    rapt_context_destroy(context_);
  }

  // Returns the code of the first function that fails.
  rapt_code TryCreate(const Case& c) {
    rapt_call_destroy(std::exchange(call_, nullptr));
    rapt_code code = rapt_call_create(c.op.c_str(), &call_, message_, sizeof(message_));
    for (const Input& input : c.inputs) {
      if (code != RAPT_OK) return code;
      code = SetInput(input.name.c_str(), CTypeOf(input.type()), input.shape);
    }
    for (const auto& [name, text] : c.attributes) {
      if (code != RAPT_OK) return code;
      code = SetText(name.c_str(), text.c_str());
    }
    for (const std::string& name : c.wants) {
      if (code != RAPT_OK) return code;
      code = rapt_call_want(call_, name.c_str(), message_, sizeof(message_));
    }
    return code;
  }
  void Create(const Case& c) { ASSERT_EQ(TryCreate(c), RAPT_OK) << message_; }
  rapt_code SetInput(const char* name, int32_t dtype, const Shape& shape) {
    return rapt_call_set_input(call_, name, dtype, static_cast<int32_t>(shape.size()), shape.data(),
                               message_, sizeof(message_));
  }
  rapt_code SetText(const char* name, const char* value) {
    return rapt_call_set_text(call_, name, value, message_, sizeof(message_));
  }
  rapt_code SetInteger(const char* name, int64_t value) {
    return rapt_call_set_integer(call_, name, value, message_, sizeof(message_));
  }
  rapt_code SetNumber(const char* name, double value) {
    return rapt_call_set_number(call_, name, value, message_, sizeof(message_));
  }
  rapt_code Plan() {
    rapt_plan_destroy(plan_);
    plan_ = nullptr;
    return rapt_call_plan(context_, call_, &plan_, message_, sizeof(message_));
  }
  rapt_code Run(const std::vector<rapt_tensor>& tensors) {
    return rapt_call_run(context_, plan_, tensors.data(), tensors.size(), nullptr, 0, message_,
                         sizeof(message_));
  }
  // An output of the plan, without its numbers.
  CaseTensor Output(const std::string& name) {
    int32_t dtype = 0, rank = 0;
    int64_t shape[RAPT_MAX_RANK];
    EXPECT_EQ(
        rapt_plan_output(plan_, name.c_str(), &dtype, &rank, shape, message_, sizeof(message_)),
        RAPT_OK)
        << message_;
    CaseTensor tensor = {static_cast<DType>(dtype - RAPT_FP32), Shape(shape, shape + rank), {}};
    tensor.bytes.resize(static_cast<size_t>(ByteSize(name, {tensor.dtype, tensor.shape}).value()));
    return tensor;
  }

  absl::StatusOr<CaseTensors> Call(const Case& c, const CaseTensors& inputs) override {
    if (TryCreate(c) != RAPT_OK || Plan() != RAPT_OK) return absl::InvalidArgumentError(message_);
    CaseTensors all = inputs, outputs;
    for (const TensorSchema& output : c.schema().outputs) {
      int32_t dtype, rank;
      int64_t shape[RAPT_MAX_RANK];
      const std::string name(output.name);
      if (rapt_plan_output(plan_, name.c_str(), &dtype, &rank, shape, message_, sizeof(message_)) ==
          RAPT_OK) {
        outputs[name] = Output(name);
      }
    }
    std::vector<rapt_tensor> pointers = PointersTo(all);
    for (const rapt_tensor& output : PointersTo(outputs)) pointers.push_back(output);
    EXPECT_EQ(Run(pointers), RAPT_OK) << message_;
    return outputs;
  }

  rapt_context* context_ = nullptr;
  rapt_call* call_ = nullptr;
  rapt_plan* plan_ = nullptr;
  char message_[RAPT_MESSAGE_BYTES] = "";
  const Input head_decay_ = {"decay", {2, 9, 2}};
};

TEST_F(CCallTest, ReturnsTheBitsOfTheOperator) { ExpectReturnsTheBitsOfTheOperator(*this); }

TEST_F(CCallTest, NamesWhatIsRefused) { ExpectNamesWhatIsRefused(*this); }

TEST_F(CCallTest, WritesInPlace) {
  const Case c = {"rotary_embedding",
                  {{"X", {2, 3, 9, 8}}},
                  {{"rope_theta", "10000"}, {"rotary_embedding_dim", "6"}}};
  CaseTensors tensors = InputsOf(c);
  const CaseTensors want = Expected(c);
  Create(c);
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  ASSERT_EQ(Run({{"X", tensors["X"].bytes.data()}, {"Y", tensors["X"].bytes.data()}}), RAPT_OK)
      << message_;
  EXPECT_EQ(tensors["X"].bytes, want.at("Y").bytes);
}

TEST_F(CCallTest, TakesNumbersAsTexts) {
  Create(Linear());
  ASSERT_EQ(SetNumber("scale", 0.1), RAPT_OK) << message_;
  ASSERT_EQ(SetInteger("chunk_size", 4), RAPT_OK) << message_;
  ASSERT_EQ(SetInteger("is_causal", 0), RAPT_OK) << message_;
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  // The plan does not depend on what happens to the call.
  rapt_call_destroy(std::exchange(call_, nullptr));

  const Case c = Linear({}, {{"scale", "0.1"}, {"chunk_size", "4"}, {"is_causal", "false"}});
  CaseTensors tensors = InputsOf(c);
  const CaseTensors want = Expected(c);
  tensors["output"] = {DType::kFloat32, {2, 9, 28}, std::string(2 * 9 * 28 * 4, '\0')};
  ASSERT_EQ(Run(PointersTo(tensors)), RAPT_OK) << message_;
  EXPECT_EQ(tensors["output"], want.at("output"));
}

TEST_F(CCallTest, ATensorOrAttributeThatIsSetAgainCountsOnce) {
  Create(Linear());
  ASSERT_EQ(SetInput("value", RAPT_FP32, {2, 9, 2}), RAPT_OK);
  ASSERT_EQ(SetInteger("q_num_heads", 2), RAPT_OK);
  ASSERT_EQ(Plan(), RAPT_INVALID_ARGUMENT);
  EXPECT_THAT(message_, HasSubstr("query"));
  ASSERT_EQ(SetInteger("q_num_heads", 4), RAPT_OK);
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  EXPECT_EQ(Output("output").shape, (Shape{2, 9, 4}));
}

TEST_F(CCallTest, NamesWhatIsInvalid) {
  Create(Linear());
  const int64_t shape[] = {2, 9, 20};
  char* const m = message_;
  const size_t size = sizeof(message_);
  rapt_call* other = nullptr;
  const std::pair<const char*, std::function<rapt_code()>> cases[] = {
      {"op is 'softmax'; it must be one of attention, attention_backward, rotary_embedding, "
       "positional_encoding, linear_attention, lsh_attention",
       [&] { return rapt_call_create("softmax", &other, m, size); }},
      {"op is null", [&] { return rapt_call_create(nullptr, &other, m, size); }},
      {"call is null", [&] { return rapt_call_create("lsh_attention", nullptr, m, size); }},
      {"linear_attention has no input 'Q'; it has query, key, value, past_state, decay",
       [&] { return SetInput("Q", RAPT_FP32, {1}); }},
      {"name is null", [&] { return SetInput(nullptr, RAPT_FP32, {1}); }},
      {"shape is null",
       [&] { return rapt_call_set_input(call_, "key", RAPT_FP32, 1, nullptr, m, size); }},
      {"query has dtype 0; it must be one of rapt_dtype",
       [&] { return SetInput("query", 0, {1}); }},
      {"query has dtype 6", [&] { return SetInput("query", 6, {1}); }},
      {"query has dtype 10", [&] { return SetInput("query", 10, {1}); }},
      {"key has rank 9; it must be from 0 to 8",
       [&] { return rapt_call_set_input(call_, "key", RAPT_FP32, 9, shape, m, size); }},
      {"key has rank -1",
       [&] { return rapt_call_set_input(call_, "key", RAPT_FP32, -1, shape, m, size); }},
      {"call is null",
       [&] { return rapt_call_set_input(nullptr, "key", RAPT_FP32, 3, shape, m, size); }},
      {"linear_attention has no attribute 'softcap'; it has update_rule",
       [&] { return SetNumber("softcap", 1); }},
      {"update_rule is 'fast'; it must be gated_delta or linear or gated or delta",
       [&] { return SetText("update_rule", "fast"); }},
      {"update_rule is 1; it must be gated_delta or linear",
       [&] { return SetInteger("update_rule", 1); }},
      {"is_causal is 2; it must be true, false, 1 or 0",
       [&] { return SetInteger("is_causal", 2); }},
      {"chunk_size is '4x'; it must be a whole number",
       [&] { return SetText("chunk_size", "4x"); }},
      {"chunk_size is ''", [&] { return SetText("chunk_size", ""); }},
      {"chunk_size is 2.5; it must be a whole number",
       [&] { return SetNumber("chunk_size", 2.5); }},
      {"seed is -1; it must be a whole number of at least 0",
       [&] { return SetInteger("seed", -1); }},
      {"seed is '18446744073709551616'", [&] { return SetText("seed", "18446744073709551616"); }},
      {"scale is 'x'; it must be a number", [&] { return SetText("scale", "x"); }},
      {"state_type is 'INT8'; it must be FP32, FP16, BF16 or FP64",
       [&] { return SetText("state_type", "INT8"); }},
      {"value is null", [&] { return SetText("scale", nullptr); }},
      {"linear_attention has no output 'Y'; it has output, present_state",
       [&] { return rapt_call_want(call_, "Y", m, size); }},
      {"name is null", [&] { return rapt_call_want(call_, nullptr, m, size); }},
      {"call is null", [&] { return rapt_call_want(nullptr, "output", m, size); }},
      {"context is null", [&] { return rapt_call_plan(nullptr, call_, &plan_, m, size); }},
      {"plan is null", [&] { return rapt_call_plan(context_, call_, nullptr, m, size); }},
  };
  for (const auto& [message, call] : cases) {
    EXPECT_EQ(call(), RAPT_INVALID_ARGUMENT) << message;
    EXPECT_THAT(message_, HasSubstr(message));
  }
  EXPECT_EQ(other, nullptr);
  ASSERT_EQ(Plan(), RAPT_OK) << message_;  // nothing was changed
}

TEST_F(CCallTest, PlansRefuseWhatTheOperatorRefuses) {
  const Case linear = Linear();
  const int64_t large = int64_t{1} << 62;
  const struct {
    const Case& base;
    const char* message;
    std::vector<Input> inputs;
    std::vector<std::pair<const char*, const char*>> attributes = {};
  } kCases[] = {
      {linear, "decay is given; update_rule is linear, which does not take it", {head_decay_}},
      {linear, "key has shape [2, -9, 10]; no axis may be negative", {{"key", {2, -9, 10}}}},
      {linear,
       "query has shape [4611686018427387904, 4611686018427387904, 4]; its size overflows 64 bits",
       {{"query", {large, large, 4}}}},
      {linear, "query has shape []; it must be [B, T, H * d]", {{"query", {}}}},
      {linear,
       "q_num_heads is 4611686018427387904; with query [1, 0, 4611686018427387904] it must "
       "be from 1 to 65536 and divide 4611686018427387904 into heads of 1 to 65536",
       {{"query", {1, 0, large}}, {"key", {1, 0, 1}}, {"value", {1, 0, 1}}},
       {{"q_num_heads", "4611686018427387904"}, {"kv_num_heads", "1"}}},
      {linear, "num_features is given; it needs feature_map favor", {}, {{"num_features", "3"}}},
  };
  for (const auto& [base, message, inputs, attributes] : kCases) {
    Create(base);
    for (const Input& input : inputs) {
      ASSERT_EQ(SetInput(input.name.c_str(), CTypeOf(input.type()), input.shape), RAPT_OK);
    }
    for (const auto& [name, text] : attributes) ASSERT_EQ(SetText(name, text), RAPT_OK);
    EXPECT_EQ(Plan(), RAPT_INVALID_ARGUMENT) << message;
    EXPECT_THAT(message_, StartsWith(message));
    EXPECT_EQ(plan_, nullptr);
  }
  Create(linear);
  ASSERT_EQ(rapt_call_want(call_, "relative_error", message_, sizeof(message_)), RAPT_OK);
  EXPECT_EQ(Plan(), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "output relative_error is requested; it needs error_rows");
  Create({"rotary_embedding", {}, {}});
  EXPECT_EQ(Plan(), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "X is missing");
}

TEST_F(CCallTest, TakesTheWorkspaceOfTheCaller) {
  const Case c = Linear();
  CaseTensors tensors = InputsOf(c);
  const CaseTensors want = Expected(c);
  tensors["output"] = {DType::kFloat32, {2, 9, 28}, std::string(2 * 9 * 28 * 4, '\0')};
  Create(c);
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  const std::vector<rapt_tensor> pointers = PointersTo(tensors);
  AlignedBuffer workspace(rapt_plan_workspace_bytes(plan_));
  ASSERT_EQ(rapt_call_run(context_, plan_, pointers.data(), pointers.size(), workspace.data(),
                          workspace.size(), message_, sizeof(message_)),
            RAPT_OK)
      << message_;
  EXPECT_EQ(tensors["output"], want.at("output"));
  EXPECT_EQ(rapt_call_run(context_, plan_, pointers.data(), pointers.size(), workspace.data(),
                          workspace.size() - 1, message_, sizeof(message_)),
            RAPT_INVALID_ARGUMENT);
}

TEST_F(CCallTest, WithoutElementsNothingIsNeeded) {
  Create({"positional_encoding", {{"X", {0, 9, 6}}}, {}});
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  EXPECT_EQ(rapt_call_run(context_, plan_, nullptr, 0, nullptr, 0, message_, sizeof(message_)),
            RAPT_OK)
      << message_;
}

TEST_F(CCallTest, RunsNameTheTensor) {
  const Case c = Linear({{"nonpad_kv_seqlen", {2}, 0, 0, {3, 9}}}, {}, {"present_state"});
  CaseTensors all = InputsOf(c);
  Create(c);
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  for (const char* name : {"output", "present_state"}) all[name] = Output(name);
  for (const auto& [name, tensor] : all) {
    CaseTensors tensors = all;
    std::vector<rapt_tensor> pointers = PointersTo(tensors);
    for (rapt_tensor& tensor : pointers) {
      if (tensor.name == name) tensor.data = nullptr;
    }
    EXPECT_EQ(Run(pointers), RAPT_INVALID_ARGUMENT);
    EXPECT_EQ(message_, name + " is missing or null");
    tensors.erase(name);
    EXPECT_EQ(Run(PointersTo(tensors)), RAPT_INVALID_ARGUMENT);
    EXPECT_EQ(message_, name + " is missing or null");
  }
  std::vector<rapt_tensor> pointers = PointersTo(all);
  pointers.push_back({"decay", nullptr});  // the call does not have it
  EXPECT_EQ(Run(pointers), RAPT_OK) << message_;
  pointers.push_back({"Y", nullptr});
  EXPECT_EQ(Run(pointers), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_,
               "linear_attention has no tensor 'Y'; it has query, key, value, past_state, decay, "
               "beta, nonpad_kv_seqlen, projection, past_normalizer, output, present_state, "
               "present_normalizer, relative_error");
  pointers.back().name = nullptr;
  EXPECT_EQ(Run(pointers), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "name is null");
  const int64_t lengths[] = {1, 10};
  std::memcpy(all["nonpad_kv_seqlen"].bytes.data(), lengths, sizeof(lengths));
  EXPECT_EQ(Run(PointersTo(all)), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "nonpad_kv_seqlen[1] is 10; it must be from 0 to the length 9");
  EXPECT_EQ(rapt_call_run(context_, plan_, nullptr, 1, nullptr, 0, message_, sizeof(message_)),
            RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "tensors is null");
  EXPECT_EQ(rapt_call_run(context_, nullptr, nullptr, 0, nullptr, 0, message_, sizeof(message_)),
            RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "plan is null");
  EXPECT_EQ(rapt_call_run(nullptr, plan_, nullptr, 0, nullptr, 0, message_, sizeof(message_)),
            RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "context is null");
}

TEST_F(CCallTest, APlanIsRunByItsOwnFunction) {
  Create(Linear());
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  const rapt_arguments arguments = {.struct_size = sizeof(arguments)};
  EXPECT_EQ(rapt_run(context_, plan_, &arguments, nullptr, 0, message_, sizeof(message_)),
            RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "plan is of linear_attention; rapt_call_run runs it");
  int32_t dtype, rank;
  int64_t shape[RAPT_MAX_RANK];
  const auto describe = [&](const char* name) {
    return rapt_plan_output(plan_, name, &dtype, &rank, shape, message_, sizeof(message_));
  };
  EXPECT_EQ(describe("present_state"), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "the plan does not have output present_state");

  rapt_plan_destroy(std::exchange(plan_, nullptr));
  const rapt_problem problem = {.struct_size = sizeof(problem),
                                .dtype = RAPT_FP32,
                                .batch = 1,
                                .query_heads = 1,
                                .kv_heads = 1,
                                .query_length = 1,
                                .key_length = 1,
                                .head_size = 1,
                                .value_head_size = 1};
  ASSERT_EQ(rapt_plan_create(context_, &problem, &plan_, message_, sizeof(message_)), RAPT_OK);
  EXPECT_EQ(Run({{"query", nullptr}}), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "plan is of rapt_problem; rapt_run runs it");
  EXPECT_EQ(describe("output"), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "plan is of rapt_problem; rapt_run runs it");
}

}  // namespace
}  // namespace rapt::test
