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
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

struct Input {
  std::string name;
  Shape shape;
  double low = -1, high = 1;           // of random numbers
  std::vector<int64_t> integers = {};  // instead of them, INT64 unless `dtype` is another
  DType dtype = DType::kFloat32;
};

struct Case {
  std::string op;
  std::vector<Input> inputs;
  std::vector<std::pair<std::string, std::string>> attributes;
  std::vector<std::string> wants = {};
};

// B 2, T 9, Hq 4, Hkv 2, d_k 5, d_v 7.
Case Linear(std::string rule, std::vector<Input> inputs = {},
            std::vector<std::pair<std::string, std::string>> attributes = {},
            std::vector<std::string> wants = {"present_state"}) {
  Case c{"linear_attention",
         {{"query", {2, 9, 20}}, {"key", {2, 9, 10}, -0.4, 0.4}, {"value", {2, 9, 14}}},
         {{"q_num_heads", "4"}, {"kv_num_heads", "2"}, {"update_rule", std::move(rule)}},
         std::move(wants)};
  c.inputs.insert(c.inputs.end(), inputs.begin(), inputs.end());
  c.attributes.insert(c.attributes.end(), attributes.begin(), attributes.end());
  return c;
}

// B 2, H 3, S 24, D 8, Dv 5.
Case Lsh(std::vector<std::pair<std::string, std::string>> attributes,
         std::vector<Input> inputs = {}) {
  Case c{"lsh_attention",
         {{"Q", {2, 3, 24, 8}}, {"V", {2, 3, 24, 5}}},
         {{"num_hashes", "2"}, {"chunk_length", "6"}},
         {"buckets"}};
  c.inputs.insert(c.inputs.end(), inputs.begin(), inputs.end());
  c.attributes.insert(c.attributes.end(), attributes.begin(), attributes.end());
  return c;
}

// 1 but every third.
std::vector<int64_t> Bits(int64_t count) {
  std::vector<int64_t> bits(count, 1);
  for (int64_t n = 2; n < count; n += 3) bits[n] = 0;
  return bits;
}

// B 2, Hq 4, Hkv 2, Sq 3, Sk 6, D 8, Dv 6.
Case Attention(std::vector<Input> inputs,
               std::vector<std::pair<std::string, std::string>> attributes,
               std::vector<std::string> wants = {}) {
  Case c{"attention",
         {{"Q", {2, 4, 3, 8}}, {"K", {2, 2, 6, 8}}, {"V", {2, 2, 6, 6}}},
         std::move(attributes),
         std::move(wants)};
  c.inputs.insert(c.inputs.end(), inputs.begin(), inputs.end());
  return c;
}

std::vector<Case> AttentionCases() {
  const Input lengths = {"nonpad_kv_seqlen", {2}, 0, 0, {4, 6}};
  const Input cos = {"cos_cache", {9, 4}}, sin = {"sin_cache", {9, 4}};
  const DType kBool = DType::kBool, kInt32 = DType::kInt32;
  Case three_axes = {"attention",
                     {{"Q", {2, 3, 32}}, {"K", {2, 6, 16}}, {"V", {2, 6, 12}}, {"head_sink", {4}}},
                     {{"q_num_heads", "4"}, {"kv_num_heads", "2"}, {"alibi", "1"}},
                     {"lse"}};
  Case values_in_keys = {"attention",
                         {{"Q", {2, 4, 3, 8}}, {"K", {2, 2, 6, 8}}},
                         {{"v_head_size", "5"}, {"scale", "0.3"}}};
  Case other_layout = {"attention",
                       {{"Q", {2, 3, 4, 8}}, {"K", {2, 6, 2, 8}}, {"V", {2, 6, 2, 6}}},
                       {{"layout", "bshd"},
                        {"alignment", "bottom_right"},
                        {"is_causal", "true"},
                        {"softmax_precision", "FP64"},
                        {"dropout_probability", "0.25"},
                        {"dropout_seed", "18446744073709551615"}}};
  return {
      three_axes,
      values_in_keys,
      other_layout,
      Attention({{"attn_mask", {3, 6}}, {"attention_bias", {4, 1, 6}}, lengths},
                {{"scale", "0.5"}, {"softcap", "2.5"}, {"qk_matmul_output_mode", "1"}},
                {"qk_matmul_output", "lse"}),
      Attention({{"past_key", {2, 2, 4, 8}}, {"past_value", {2, 2, 4, 6}}}, {{"is_causal", "1"}},
                {"present_key", "present_value"}),
      Attention({{"global_mask", {2, 6}, 0, 0, Bits(12), kBool}},
                {{"left_window_size", "1"}, {"right_window_size", "0"}, {"prefix_keys", "2"}}),
      Attention({{"alibi_slopes", {4}, 0, 1}}, {}),
      Attention({{"bias_table", {8, 4}}}, {{"is_bidirectional", "1"}, {"max_distance", "5"}}),
      Attention({{"relative_bias", {4, 5}}}, {}),
      Attention({{"relative_keys", {1, 5, 8}}, {"relative_values", {4, 5, 6}}}, {}),
      Attention({{"relative_keys", {1, 5, 8}}, {"relative_query", {2, 4, 3, 8}}}, {}),
      Attention({cos,
                 sin,
                 {"position_ids", {2, 3}, 0, 0, {5, 6, 7, 0, 1, 8}},
                 {"key_position_ids", {2, 6}, 0, 0, {0, 1, 2, 3, 4, 5, 6, 7, 8, 2, 1, 0}}},
                {{"interleaved", "1"}}),
      Attention({}, {{"rope_theta", "500"}, {"rotary_embedding_dim", "4"}, {"rotary_keys", "0"}}),
      Attention({{"additive_weight", {4, 8}}}, {{"score_function", "additive"}}),
      Attention({}, {{"normalizer", "entmax"}, {"alpha", "1.25"}}),
      Attention({{"head_alpha", {4}, 1.1, 1.9}}, {{"normalizer", "entmax"}}),
      Attention({{"block_mask", {2, 1, 2, 3}, 0, 0, Bits(12), kBool}},
                {{"block_q", "2"}, {"block_k", "2"}}),
      Attention(
          {{"selected_indices", {2, 1, 3, 2}, 0, 0, {0, 1, 2, 3, 4, 5, 0, -1, 5, 2, 3, 1}, kInt32}},
          {}),
  };
}

// The gradients of the float inputs of a call of attention.
Case Backward(Case c) {
  const bool is_3d = c.inputs[0].shape.size() == 3;
  Shape y = c.inputs[0].shape;
  y.back() = is_3d ? 24 : 6;
  std::erase_if(c.attributes, [&](const auto& attribute) {
    if (attribute.first == "v_head_size") y.back() = 5;
    return attribute.first == "qk_matmul_output_mode";
  });
  c.op = "attention_backward";
  c.wants.clear();
  const OperatorSchema& schema = *FindOperator(c.op);
  for (const TensorSchema& gradient : schema.outputs) {
    for (const Input& input : c.inputs) {
      const bool is_of = gradient.name == "d" + input.name || gradient.name == "d_" + input.name;
      if (is_of) c.wants.emplace_back(gradient.name);
    }
  }
  c.inputs.push_back({"dY", y});
  const bool has_lse = c.attributes.empty() || c.attributes[0].first != "normalizer";
  if (has_lse) {
    c.inputs.push_back({"Y", y});
    c.inputs.push_back({"lse", {2, 4, 3}, 1, 2});
    c.inputs.push_back({"dlse", {2, 4, 3}});
  }
  return c;
}

std::vector<Case> Cases() {
  const Input past = {"past_state", {2, 2, 5, 7}}, head_decay = {"decay", {2, 9, 2}, -1, 0},
              key_decay = {"decay", {2, 9, 10}, -1, 0}, beta = {"beta", {2, 9, 1}, 0, 1},
              lengths = {"nonpad_kv_seqlen", {2}, 0, 0, {3, 9}};
  const Input key = {"K", {2, 3, 24, 8}}, padded = {"nonpad_kv_seqlen", {2}, 0, 0, {24, 19}};
  const Input cos = {"cos_cache", {50, 4}}, sin = {"sin_cache", {50, 4}};
  std::vector<Case> cases = {
      Linear("gated_delta", {head_decay, beta, past, lengths}),
      Linear("gated_delta", {key_decay, beta, past, lengths}, {{"state_type", "FP64"}}),
      Linear("linear", {}, {{"scale", "0.3"}, {"chunk_size", "4"}}),
      Linear("gated", {head_decay}),
      Linear("gated", {{"decay", {2, 9, 2}, -1, 0, {}, DType::kFloat64},
                       {"past_state", {2, 2, 5, 7}, -1, 1, {}, DType::kFloat16}}),
      Linear("delta", {{"beta", {2, 9, 2}, 0, 1}}, {}, {}),
      Linear("linear", {}, {{"feature_map", "elu1"}, {"normalize", "true"}},
             {"present_state", "present_normalizer"}),
      Linear("linear", {},
             {{"feature_map", "favor"},
              {"num_features", "6"},
              {"is_causal", "0"},
              {"seed", "18446744073709551615"},
              {"error_rows", "10"}},
             {"present_normalizer", "relative_error"}),
      Linear("linear",
             {{"projection", {6, 5}, -2, 2},
              {"past_state", {2, 2, 6, 7}, 0, 1},
              {"past_normalizer", {2, 2, 6}, 1, 2}},
             {{"feature_map", "favor"}}),
      Lsh({{"num_buckets", "4"}, {"seed", "5"}, {"is_causal", "1"}}, {padded}),
      Lsh({{"form", "simple"}, {"seed", "5"}}, {key}),
      {"lsh_attention",
       {{"Q", {1, 1, 8, 4}, -1, 1, {}, DType::kBFloat16},
        {"V", {1, 1, 8, 4}, -1, 1, {}, DType::kBFloat16}},
       {{"chunk_length", "4"}, {"seed", "1"}}},
      Lsh({{"form", "simple"}}, {key, {"rotations", {3, 8, 2, 8}}}),
      Lsh({{"num_buckets", "4"}, {"scale", "0.7"}, {"chunks_before", "0"}, {"chunks_after", "1"}},
          {{"rotations", {1, 8, 2, 2}}}),
      {"rotary_embedding", {{"X", {2, 3, 9, 8}}}, {{"rope_theta", "10000"}}},
      {"rotary_embedding",
       {{"X", {2, 3, 9, 8}, -1, 1, {}, DType::kFloat16}, cos, sin},
       {{"rotary_embedding_dim", "8"}}},
      {"rotary_embedding", {{"X", {2, 3, 9, 8}}, cos, sin}, {{"interleaved", "true"}}},
      {"rotary_embedding",
       {{"X", {2, 3, 24}}, cos, sin, {"position_ids", {2, 3}, 0, 0, {0, 7, 49, 2, 2, 1}}},
       {{"num_heads", "3"}}},
      {"positional_encoding", {{"X", {2, 9, 6}}}, {{"base", "100"}}},
      {"positional_encoding", {{"X", {9, 6}, -1, 1, {}, DType::kFloat64}}, {}},
      {"positional_encoding", {{"X", {3, 2, 9, 6}}, {"table", {11, 6}}}, {}},
      {"positional_encoding", {{"X", {0, 9, 6}}}, {}},
  };
  for (const Case& c : AttentionCases()) {
    cases.push_back(c);
    cases.push_back(Backward(c));
  }
  return cases;
}

DType TypeOf(const Input& input) {
  const bool is_default = input.dtype == DType::kFloat32;
  return input.integers.empty() || !is_default ? input.dtype : DType::kInt64;
}

size_t BytesOf(const TensorSpec& spec) {
  int64_t bytes = SizeOf(spec.dtype);
  for (const int64_t axis : spec.shape) bytes *= axis;
  return static_cast<size_t>(bytes);
}

template <typename Row>
const Row& RowOf(absl::Span<const Row> rows, const std::string& name) {
  for (const Row& row : rows) {
    if (row.name == name) return row;
  }
  ADD_FAILURE() << "no " << name;
  return rows[0];
}

// The bytes of tensors by their names.
using Tensors = std::map<std::string, std::vector<std::byte>>;

Tensors InputsOf(const Case& c) {
  Rng rng(1);
  Tensors tensors;
  for (const Input& input : c.inputs) {
    std::vector<std::byte>& bytes = tensors[input.name];
    bytes.resize(BytesOf({TypeOf(input), input.shape}));
    if (!input.integers.empty()) {
      const auto size = static_cast<size_t>(SizeOf(TypeOf(input)));
      for (size_t n = 0; n < input.integers.size(); ++n) {
        std::memcpy(bytes.data() + n * size, &input.integers[n], size);  // little-endian
      }
      continue;
    }
    if (bytes.empty()) continue;
    Tensor numbers(input.dtype,
                   {1, 1, 1, static_cast<int64_t>(bytes.size()) / SizeOf(input.dtype)});
    numbers.FillUniform(rng, input.low, input.high);
    std::memcpy(bytes.data(), numbers.View().data, bytes.size());
  }
  return tensors;
}

BoundCall BoundOf(const Case& c) {
  const OperatorSchema& schema = *FindOperator(c.op);
  const std::unique_ptr<SchemaCall> call = schema.new_call();
  for (const Input& input : c.inputs) {
    call->inputs()[RowOf(schema.inputs, input.name).slot] = {TypeOf(input), input.shape};
  }
  for (const auto& [name, text] : c.attributes) {
    const AttributeSchema& attribute = RowOf(schema.attributes, name);
    attribute.set(*call, ReadValue(attribute, GivenValue(text)).value());
  }
  for (const std::string& name : c.wants) {
    const TensorSchema& output = RowOf(schema.outputs, name);
    if (output.want != nullptr) output.want(*call);
  }
  return call->Bind().value();
}

// The outputs by the operator in C++.
Tensors Expected(const Case& c, const BoundCall& call, Tensors& inputs) {
  const OperatorSchema& schema = *FindOperator(c.op);
  Arguments arguments;
  for (const Input& input : c.inputs) {
    const Slot slot = RowOf(schema.inputs, input.name).slot;
    arguments.inputs[slot].data = inputs[input.name].data();
    if (slot == Role::kKeyLengths) arguments.key_lengths = input.integers;
  }
  Tensors outputs;
  for (const TensorSchema& output : schema.outputs) {
    const auto& spec = call.outputs()[output.slot];
    if (!spec) continue;
    std::vector<std::byte>& bytes = outputs[std::string(output.name)];
    bytes.resize(BytesOf(*spec));
    arguments.outputs[output.slot].data = bytes.data();
  }
  const Plan plan = call.MakePlan({.threads = 2}).value();
  AlignedBuffer workspace(plan.workspace_bytes());
  ThreadPool pool(2);
  EXPECT_EQ(call.Run(plan, arguments, workspace.span(), pool), absl::OkStatus());
  return outputs;
}

class CCallTest : public ::testing::Test {
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

  void Create(const Case& c) {
    rapt_call_destroy(call_);
    ASSERT_EQ(rapt_call_create(c.op.c_str(), &call_, message_, sizeof(message_)), RAPT_OK);
    for (const Input& input : c.inputs) {
      ASSERT_EQ(SetInput(input.name.c_str(), CTypeOf(TypeOf(input)), input.shape), RAPT_OK)
          << message_;
    }
    for (const auto& [name, text] : c.attributes) {
      ASSERT_EQ(SetText(name.c_str(), text.c_str()), RAPT_OK) << message_;
    }
    for (const std::string& name : c.wants) {
      ASSERT_EQ(rapt_call_want(call_, name.c_str(), message_, sizeof(message_)), RAPT_OK)
          << message_;
    }
  }
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
  // The type and shape of an output of the plan.
  TensorSpec Output(const std::string& name) {
    int32_t dtype = 0, rank = 0;
    int64_t shape[RAPT_MAX_RANK];
    EXPECT_EQ(
        rapt_plan_output(plan_, name.c_str(), &dtype, &rank, shape, message_, sizeof(message_)),
        RAPT_OK)
        << message_;
    return {static_cast<DType>(dtype - RAPT_FP32), Shape(shape, shape + rank)};
  }

  rapt_context* context_ = nullptr;
  rapt_call* call_ = nullptr;
  rapt_plan* plan_ = nullptr;
  char message_[RAPT_MESSAGE_BYTES] = "";
  const Input head_decay_ = {"decay", {2, 9, 2}};
};

std::vector<rapt_tensor> PointersTo(Tensors& tensors) {
  std::vector<rapt_tensor> pointers;
  for (auto& [name, bytes] : tensors) pointers.push_back({name.c_str(), bytes.data()});
  return pointers;
}

TEST_F(CCallTest, ReturnsTheBitsOfTheOperator) {
  for (const Case& c : Cases()) {
    std::string attributes;
    for (const auto& [name, text] : c.attributes) attributes += " " + name + "=" + text;
    SCOPED_TRACE(c.op + attributes + " " + c.inputs.back().name);
    Tensors tensors = InputsOf(c);
    const BoundCall bound = BoundOf(c);
    const Tensors want = Expected(c, bound, tensors);
    Create(c);
    ASSERT_EQ(Plan(), RAPT_OK) << message_;
    for (const auto& [name, bytes] : want) {
      const TensorSpec spec = Output(name);
      const TensorSpec& expected = *bound.outputs()[RowOf(FindOperator(c.op)->outputs, name).slot];
      EXPECT_EQ(spec.dtype, expected.dtype) << name;
      EXPECT_EQ(spec.shape, expected.shape) << name;
      tensors[name].resize(bytes.size());
    }
    ASSERT_EQ(Run(PointersTo(tensors)), RAPT_OK) << message_;
    for (const auto& [name, bytes] : want) EXPECT_EQ(tensors[name], bytes) << name;
  }
}

TEST_F(CCallTest, CoversEveryTensorAndAttribute) {
  std::map<std::string, std::vector<std::string>> used;
  for (const Case& c : Cases()) {
    for (const Input& input : c.inputs) used[c.op].push_back(input.name);
    for (const auto& [name, text] : c.attributes) used[c.op].push_back(name);
    for (const std::string& name : c.wants) used[c.op].push_back(name);
  }
  for (const OperatorSchema* schema : OperatorSchemas()) {
    const std::vector<std::string>& names = used[std::string(schema->name)];
    for (const TensorSchema& input : schema->inputs) {
      EXPECT_THAT(names, ::testing::Contains(std::string(input.name)));
    }
    for (const AttributeSchema& attribute : schema->attributes) {
      EXPECT_THAT(names, ::testing::Contains(std::string(attribute.name)));
    }
    for (const TensorSchema& output : schema->outputs) {
      if (output.want == nullptr) continue;
      EXPECT_THAT(names, ::testing::Contains(std::string(output.name)));
    }
  }
}

TEST_F(CCallTest, WritesInPlace) {
  const Case c = {"rotary_embedding",
                  {{"X", {2, 3, 9, 8}}},
                  {{"rope_theta", "10000"}, {"rotary_embedding_dim", "6"}}};
  Tensors tensors = InputsOf(c);
  const Tensors want = Expected(c, BoundOf(c), tensors);
  Create(c);
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  ASSERT_EQ(Run({{"X", tensors["X"].data()}, {"Y", tensors["X"].data()}}), RAPT_OK) << message_;
  EXPECT_EQ(tensors["X"], want.at("Y"));
}

TEST_F(CCallTest, TakesNumbersAsTexts) {
  Create(Linear("linear", {}, {}, {}));
  ASSERT_EQ(SetNumber("scale", 0.1), RAPT_OK) << message_;
  ASSERT_EQ(SetInteger("chunk_size", 4), RAPT_OK) << message_;
  ASSERT_EQ(SetInteger("is_causal", 0), RAPT_OK) << message_;
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  // The plan does not depend on what happens to the call.
  rapt_call_destroy(std::exchange(call_, nullptr));

  const Case c =
      Linear("linear", {}, {{"scale", "0.1"}, {"chunk_size", "4"}, {"is_causal", "false"}}, {});
  Tensors tensors = InputsOf(c);
  const Tensors want = Expected(c, BoundOf(c), tensors);
  tensors["output"].resize(want.at("output").size());
  ASSERT_EQ(Run(PointersTo(tensors)), RAPT_OK) << message_;
  EXPECT_EQ(tensors["output"], want.at("output"));
}

TEST_F(CCallTest, ATensorOrAttributeThatIsSetAgainCountsOnce) {
  Create(Linear("linear", {}, {}, {}));
  ASSERT_EQ(SetInput("value", RAPT_FP32, {2, 9, 2}), RAPT_OK);
  ASSERT_EQ(SetInteger("q_num_heads", 2), RAPT_OK);
  ASSERT_EQ(Plan(), RAPT_INVALID_ARGUMENT);
  EXPECT_THAT(message_, HasSubstr("query"));
  ASSERT_EQ(SetInteger("q_num_heads", 4), RAPT_OK);
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  EXPECT_EQ(Output("output").shape, (Shape{2, 9, 4}));
}

TEST_F(CCallTest, NamesWhatIsInvalid) {
  Create(Linear("linear", {}, {}, {}));
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
  const Case linear = Linear("linear", {}, {}, {});
  const Case lsh = Lsh({{"seed", "1"}});
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
      {linear, "chunk_size is -1; it must be at least 1", {}, {{"chunk_size", "-1"}}},
      {lsh, "num_hashes is 1025; it must be from 1 to 1024", {}, {{"num_hashes", "1025"}}},
      {lsh, "num_buckets is 3; it must be even", {}, {{"num_buckets", "3"}}},
      {lsh, "chunk_length is 7; it must divide the length 24", {}, {{"chunk_length", "7"}}},
      {lsh, "scale is inf", {}, {{"scale", "inf"}}},
      {lsh,
       "is_causal is true; form 'simple' hides only padding",
       {{"K", {2, 3, 24, 8}}},
       {{"form", "simple"}, {"is_causal", "1"}}},
  };
  for (const auto& [base, message, inputs, attributes] : kCases) {
    Create(base);
    for (const Input& input : inputs) {
      ASSERT_EQ(SetInput(input.name.c_str(), CTypeOf(TypeOf(input)), input.shape), RAPT_OK);
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
  const Case c = Linear("linear", {}, {}, {});
  Tensors tensors = InputsOf(c);
  const Tensors want = Expected(c, BoundOf(c), tensors);
  tensors["output"].resize(want.at("output").size());
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
  const Case c = Linear("linear", {{"nonpad_kv_seqlen", {2}, 0, 0, {3, 9}}});
  Tensors all = InputsOf(c);
  Create(c);
  ASSERT_EQ(Plan(), RAPT_OK) << message_;
  for (const char* name : {"output", "present_state"}) all[name].resize(BytesOf(Output(name)));
  for (const auto& [name, bytes] : all) {
    Tensors tensors = all;
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
  std::memcpy(all["nonpad_kv_seqlen"].data(), lengths, sizeof(lengths));
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
  Create(Linear("linear", {}, {}, {}));
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
