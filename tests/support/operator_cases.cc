#include "tests/support/operator_cases.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <memory>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/aligned_buffer.h"
#include "base/thread_pool.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using Inputs = std::vector<CaseInput>;
using Attributes = std::vector<std::pair<std::string, std::string>>;
using Names = std::vector<std::string>;

constexpr DType kFloat32 = DType::kFloat32, kFloat16 = DType::kFloat16,
                kBFloat16 = DType::kBFloat16, kFloat64 = DType::kFloat64, kBool = DType::kBool;

template <typename T>
void Append(const std::vector<T>& more, std::vector<T>& to) {
  to.insert(to.end(), more.begin(), more.end());
}

// 1 but every third.
std::vector<int64_t> Bits(int64_t count) {
  std::vector<int64_t> bits(static_cast<size_t>(count), 1);
  for (size_t n = 2; n < bits.size(); n += 3) bits[n] = 0;
  return bits;
}

// B 2, T 9, Hq 4, Hkv 2, d_k 5, d_v 7.
OperatorCase Linear(std::string rule, const Inputs& inputs = {}, const Attributes& attributes = {},
                    Names wants = {"present_state"}) {
  OperatorCase c{"linear_attention",
                 {{"query", {2, 9, 20}}, {"key", {2, 9, 10}, -0.4, 0.4}, {"value", {2, 9, 14}}},
                 {{"q_num_heads", "4"}, {"kv_num_heads", "2"}, {"update_rule", std::move(rule)}},
                 std::move(wants)};
  Append(inputs, c.inputs);
  Append(attributes, c.attributes);
  return c;
}

// B 2, H 3, S 24, D 8, Dv 5.
OperatorCase Lsh(const Attributes& attributes, const Inputs& inputs = {}) {
  OperatorCase c{"lsh_attention",
                 {{"Q", {2, 3, 24, 8}}, {"V", {2, 3, 24, 5}}},
                 {{"num_hashes", "2"}, {"chunk_length", "6"}},
                 {"buckets"}};
  Append(inputs, c.inputs);
  Append(attributes, c.attributes);
  return c;
}

// B 2, Hq 4, Hkv 2, Sq 3, Sk 6, D 8, Dv 6.
OperatorCase Attention(const Inputs& inputs, Attributes attributes, Names wants = {}) {
  OperatorCase c{"attention",
                 {{"Q", {2, 4, 3, 8}}, {"K", {2, 2, 6, 8}}, {"V", {2, 2, 6, 6}}},
                 std::move(attributes),
                 std::move(wants)};
  Append(inputs, c.inputs);
  return c;
}

OperatorCase OfType(DType dtype, OperatorCase c) {
  for (CaseInput& input : c.inputs) input.dtype = dtype;
  return c;
}

std::vector<OperatorCase> AttentionCases() {
  const CaseInput lengths = {"nonpad_kv_seqlen", {2}, 0, 0, {4, 6}};
  const CaseInput cos = {"cos_cache", {9, 4}}, sin = {"sin_cache", {9, 4}};
  const auto scores = [](const char* mode) {
    return Attention({{"attn_mask", {3, 6}}}, {{"softcap", "2"}, {"qk_matmul_output_mode", mode}},
                     {"qk_matmul_output"});
  };
  return {
      {"attention",
       {{"Q", {2, 3, 32}}, {"K", {2, 6, 16}}, {"V", {2, 6, 12}}, {"head_sink", {4}}},
       {{"layout", "bse"}, {"q_num_heads", "4"}, {"kv_num_heads", "2"}, {"alibi", "1"}},
       {"lse"}},
      {"attention",
       {{"Q", {2, 4, 3, 8}}, {"K", {2, 2, 6, 8}}},
       {{"v_head_size", "5"}, {"scale", "0.3"}}},
      {"attention",
       {{"Q", {2, 3, 4, 8}}, {"K", {2, 6, 2, 8}}, {"V", {2, 6, 2, 6}}},
       {{"layout", "bshd"},
        {"alignment", "bottom_right"},
        {"is_causal", "true"},
        {"softmax_precision", "FP64"},
        {"dropout_probability", "0.25"},
        {"dropout_seed", "18446744073709551615"}}},
      Attention({lengths}, {{"layout", "bhsd"},
                            {"alignment", "top_left"},
                            {"is_causal", "true"},
                            {"score_function", "dot_product"},
                            {"normalizer", "softmax"},
                            {"softmax_precision", "FP16"}}),
      Attention({lengths}, {{"layout", "unspecified"}, {"is_causal", "true"}}),
      OfType(kFloat16, Attention({}, {{"is_causal", "1"}})),
      OfType(kBFloat16, Attention({}, {{"softcap", "1"}})),
      OfType(kFloat64, Attention({}, {{"scale", "0.5"}})),
      Attention({{"attn_mask", {3, 6}, 0, 0, Bits(18), kBool}}, {}),
      Attention(
          {{"attn_mask", {3, 6}}, {"attention_bias", {4, 1, 6}, -1, 1, {}, kBFloat16}, lengths},
          {{"scale", "0.5"}, {"softcap", "2.5"}}, {"lse"}),
      scores("0"),
      scores("1"),
      scores("2"),
      scores("3"),
      Attention({{"past_key", {2, 2, 4, 8}}, {"past_value", {2, 2, 4, 6}}},
                {{"alignment", "onnx"}, {"is_causal", "1"}}, {"present_key", "present_value"}),
      Attention({{"global_mask", {2, 6}, 0, 0, {0, 0, 0, 0, 1, 0, 0, 0, 0, 0, 0, 1}, kBool}},
                {{"left_window_size", "0"}, {"right_window_size", "0"}, {"prefix_keys", "1"}}),
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
      Attention({{"cos_cache", {2, 3, 4}}, {"sin_cache", {2, 3, 4}}}, {{"rotary_keys", "0"}}),
      Attention({}, {{"rope_theta", "500"}, {"rotary_embedding_dim", "4"}, {"rotary_keys", "0"}}),
      Attention({{"additive_weight", {4, 8}}}, {{"score_function", "additive"}}),
      Attention({}, {{"normalizer", "sparsemax"}}),
      Attention({}, {{"normalizer", "entmax15"}}),
      Attention({}, {{"normalizer", "entmax"}, {"alpha", "1.25"}}),
      Attention({{"head_alpha", {4}, 1.1, 1.9}}, {{"normalizer", "entmax"}}),
      Attention({{"block_mask", {2, 1, 2, 3}, 0, 0, Bits(12), kBool}},
                {{"block_q", "2"}, {"block_k", "2"}}),
      Attention({{"selected_indices",
                  {2, 1, 3, 2},
                  0,
                  0,
                  {0, 1, 2, 3, 4, 5, 0, -1, 5, 2, 3, 1},
                  DType::kInt32}},
                {}),
      // No queries, no keys, no batch.
      {"attention", {{"Q", {2, 4, 0, 8}}, {"K", {2, 2, 6, 8}}, {"V", {2, 2, 6, 6}}}, {}},
      {"attention", {{"Q", {2, 4, 3, 8}}, {"K", {2, 2, 0, 8}}, {"V", {2, 2, 0, 6}}}, {}},
      {"attention", {{"Q", {0, 4, 3, 8}}, {"K", {0, 2, 6, 8}}, {"V", {0, 2, 6, 6}}}, {}},
      // Many tasks; keys in several parts.
      {"attention", {{"Q", {1, 4, 200, 16}}, {"K", {1, 2, 200, 16}}, {"V", {1, 2, 200, 6}}}, {}},
      {"attention", {{"Q", {1, 2, 1, 8}}, {"K", {1, 1, 5000, 8}}, {"V", {1, 1, 5000, 6}}}, {}},
  };
}

// The gradients of the float inputs of a call of attention.
OperatorCase BackwardOf(OperatorCase c) {
  const bool is_3d = c.inputs[0].shape.size() == 3;
  const bool has_v = c.inputs.size() > 2;
  Shape y = c.inputs[0].shape;
  y.back() = is_3d ? 24 : has_v ? 6 : 5;
  std::erase_if(c.attributes,
                [](const auto& attribute) { return attribute.first == "qk_matmul_output_mode"; });
  c.op = "attention_backward";
  c.wants.clear();
  for (const TensorSchema& gradient : c.schema().outputs) {
    for (const CaseInput& input : c.inputs) {
      const bool is_of = gradient.name == "d" + input.name || gradient.name == "d_" + input.name;
      if (is_of && IsFloat(input.type())) c.wants.emplace_back(gradient.name);
    }
  }
  const DType type = c.inputs[0].dtype;
  c.inputs.push_back({"dY", y, -1, 1, {}, type});
  const bool has_lse = std::none_of(c.attributes.begin(), c.attributes.end(), [](const auto& a) {
    return a.first == "normalizer" && a.second != "softmax";
  });
  if (has_lse) {
    const Shape& q = c.inputs[0].shape;
    const bool is_by_position = q[1] == 3;  // [B, Sq, ...]
    const Shape lse = is_by_position ? Shape{2, 4, 3} : Shape{q[0], q[1], q[2]};
    const DType lse_type = type == kFloat64 ? kFloat64 : kFloat32;
    c.inputs.push_back({"Y", y, -1, 1, {}, type});
    c.inputs.push_back({"lse", lse, 1, 2, {}, lse_type});
    c.inputs.push_back({"dlse", lse, -1, 1, {}, lse_type});
  }
  return c;
}

std::vector<OperatorCase> LinearCases() {
  const CaseInput past = {"past_state", {2, 2, 5, 7}}, head_decay = {"decay", {2, 9, 2}, -1, 0},
                  key_decay = {"decay", {2, 9, 10}, -1, 0}, beta = {"beta", {2, 9, 1}, 0, 1},
                  lengths = {"nonpad_kv_seqlen", {2}, 0, 0, {3, 9}};
  return {
      Linear("gated_delta", {head_decay, beta, past, lengths}),
      Linear("gated_delta", {key_decay, beta, past, lengths}, {{"state_type", "FP64"}}),
      OfType(kFloat16, Linear("gated_delta", {head_decay, beta}, {{"state_type", "BF16"}})),
      OfType(kBFloat16, Linear("linear", {}, {{"state_type", "FP32"}})),
      OfType(kFloat64, Linear("linear", {}, {{"state_type", "FP16"}})),
      Linear("linear", {}, {{"scale", "0.3"}, {"chunk_size", "4"}, {"feature_map", "none"}}),
      Linear("linear", {}, {{"feature_map", "relu"}}),
      Linear("gated", {head_decay}),
      Linear("gated", {{"decay", {2, 9, 2}, -1, 0, {}, kFloat64},
                       {"past_state", {2, 2, 5, 7}, -1, 1, {}, kFloat16}}),
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
  };
}

std::vector<OperatorCase> LshCases() {
  const CaseInput key = {"K", {2, 3, 24, 8}}, padded = {"nonpad_kv_seqlen", {2}, 0, 0, {24, 19}};
  const auto typed = [](DType dtype) {
    return OfType(dtype, {"lsh_attention",
                          {{"Q", {1, 1, 8, 4}}, {"V", {1, 1, 8, 4}}},
                          {{"chunk_length", "4"}, {"seed", "1"}}});
  };
  return {
      Lsh({{"num_buckets", "4"}, {"seed", "5"}, {"is_causal", "1"}}, {padded}),
      Lsh({{"form", "simple"}, {"seed", "5"}}, {key}),
      typed(kFloat16),
      typed(kBFloat16),
      typed(kFloat64),
      Lsh({{"form", "simple"}}, {key, {"rotations", {3, 8, 2, 8}}}),
      Lsh({{"form", "reformer"},
           {"num_buckets", "4"},
           {"scale", "0.7"},
           {"chunks_before", "0"},
           {"chunks_after", "1"}},
          {{"rotations", {1, 8, 2, 2}}}),
  };
}

std::vector<OperatorCase> PositionCases() {
  const CaseInput cos = {"cos_cache", {50, 4}}, sin = {"sin_cache", {50, 4}};
  const auto x = [](DType dtype) { return CaseInput{"X", {2, 3, 9, 8}, -1, 1, {}, dtype}; };
  return {
      {"rotary_embedding", {x(kFloat32)}, {{"rope_theta", "10000"}}},
      {"rotary_embedding", {x(kFloat16), cos, sin}, {{"rotary_embedding_dim", "8"}}},
      {"rotary_embedding", {x(kBFloat16)}, {{"rope_theta", "9"}, {"rotary_embedding_dim", "4"}}},
      {"rotary_embedding", {x(kFloat64)}, {{"rope_theta", "9"}}},
      {"rotary_embedding", {x(kFloat32), cos, sin}, {{"interleaved", "true"}}},
      {"rotary_embedding",
       {{"X", {2, 3, 24}}, cos, sin, {"position_ids", {2, 3}, 0, 0, {0, 7, 49, 2, 2, 1}}},
       {{"num_heads", "3"}}},
      {"positional_encoding", {{"X", {2, 9, 6}}}, {{"base", "100"}}},
      {"positional_encoding", {{"X", {9, 6}, -1, 1, {}, kFloat64}}, {}},
      {"positional_encoding", {{"X", {9, 6}, -1, 1, {}, kFloat16}}, {}},
      {"positional_encoding", {{"X", {9, 6}, -1, 1, {}, kBFloat16}}, {}},
      {"positional_encoding", {{"X", {1, 3, 1, 2, 9, 6}}, {"table", {11, 6}}}, {}},
      {"positional_encoding", {{"X", {0, 9, 6}}}, {}},
  };
}

// A number out of the range of an attribute.
struct BadNumber {
  const char* op;
  const char* name;
  const char* value;
  const char* message;
};
constexpr BadNumber kBadNumbers[] = {
    {"attention", "q_num_heads", "5", "must be a multiple of q_num_heads = 5"},
    {"attention", "kv_num_heads", "3", "must be a multiple of kv_num_heads = 3"},
    {"attention", "left_window_size", "-2", "is -2; it must be -1 (unbounded) or at least 0"},
    {"attention", "right_window_size", "-2", "is -2; it must be -1 (unbounded) or at least 0"},
    {"attention", "scale", "inf", "scale is inf; it must be finite"},
    {"attention", "softcap", "-1", "softcap is -1; it must be 0 (none) or positive and finite"},
    {"attention", "dropout_probability", "1", "dropout_probability is 1; it must be"},
    {"attention", "max_distance", "0", "max_distance is 0; it must be at least 1"},
    {"attention", "v_head_size", "9", "v_head_size is 9; it must be"},
    {"attention", "rotary_embedding_dim", "3", "rotary_embedding_dim is 3; it must be"},
    {"attention", "rope_theta", "0", "rope_theta is 0; it must be positive and finite"},
    {"attention", "alpha", "2.5", "alpha is 2.5; it must be from 1 (softmax) to 2 (sparsemax)"},
    {"attention", "block_q", "0", "block_q is 0; it must be at least 1"},
    {"attention", "block_k", "0", "block_k is 0; it must be at least 1"},
    {"attention", "prefix_keys", "-1", "prefix_keys is -1; it must be at least 0"},
    {"attention", "qk_matmul_output_mode", "4", "it must be 0 (scores), 1 (after softcap)"},
    {"linear_attention", "q_num_heads", "3", "q_num_heads is 3; with query"},
    {"linear_attention", "kv_num_heads", "3", "kv_num_heads is 3; with key"},
    {"linear_attention", "scale", "inf", "scale is inf; it must be finite"},
    {"linear_attention", "chunk_size", "-1", "chunk_size is -1; it must be at least 1"},
    {"linear_attention", "num_features", "0", "num_features is 0; it must be"},
    {"linear_attention", "error_rows", "-1", "error_rows is -1; it must be from 0 to 65536"},
    {"lsh_attention", "num_hashes", "1025", "num_hashes is 1025; it must be from 1 to 1024"},
    {"lsh_attention", "num_buckets", "3", "num_buckets is 3; it must be even"},
    {"lsh_attention", "chunk_length", "7", "chunk_length is 7; it must divide the length 24"},
    {"lsh_attention", "chunks_before", "-1", "chunks_before is -1; it must be"},
    {"lsh_attention", "chunks_after", "-1", "chunks_after is -1; it must be"},
    {"lsh_attention", "scale", "inf", "scale is inf; it must be finite"},
    {"rotary_embedding", "num_heads", "5", "num_heads is 5; with X [2, 3, 24] of rank 3 it must"},
    {"rotary_embedding", "rotary_embedding_dim", "3", "rotary_embedding_dim is 3; it must be"},
    {"rotary_embedding", "rope_theta", "0", "rope_theta is 0; it must be positive and finite"},
    {"positional_encoding", "base", "-1", "base is -1; it must be positive and finite"},
};

// Returns the first case with the attribute, with another value. Empty `op`: there is none.
OperatorCase WithValue(absl::string_view op, absl::string_view name, const char* value) {
  for (OperatorCase c : OperatorCases()) {
    if (c.op != op) continue;
    for (auto& [attribute, text] : c.attributes) {
      if (attribute != name) continue;
      text = value;
      return c;
    }
  }
  return {};
}

}  // namespace

std::vector<std::string> OperatorCase::outputs() const {
  std::vector<std::string> names;
  if (wants.empty()) return names;
  for (const TensorSchema& output : schema().outputs) {
    if (output.required) names.emplace_back(output.name);
  }
  Append(wants, names);
  return names;
}

std::string ToText(const OperatorCase& c) {
  std::string text = c.op;
  for (const CaseInput& input : c.inputs) absl::StrAppend(&text, " ", input.name);
  for (const auto& [name, value] : c.attributes) absl::StrAppend(&text, " ", name, "=", value);
  return text;
}

const std::vector<OperatorCase>& OperatorCases() {
  static const auto* const cases = [] {
    auto* all = new std::vector<OperatorCase>;
    for (const auto& of_operator : {LinearCases(), LshCases(), PositionCases()}) {
      Append(of_operator, *all);
    }
    for (const OperatorCase& c : AttentionCases()) {
      all->push_back(c);
      all->push_back(BackwardOf(c));
    }
    // Of Q, K and V unless others are asked for, and without Y and lse.
    for (OperatorCase c : {Attention({}, {}), AttentionCases()[1]}) {
      c = BackwardOf(c);
      c.wants.clear();
      std::erase_if(c.inputs, [](const CaseInput& input) {
        return input.name == "Y" || input.name == "lse" || input.name == "dlse";
      });
      all->push_back(c);
    }
    return all;
  }();
  return *cases;
}

const std::vector<Refusal>& NumberRefusals() {
  static const auto* const refusals = [] {
    auto* all = new std::vector<Refusal>;
    for (const BadNumber& bad : kBadNumbers) {
      for (const OperatorSchema* schema : OperatorSchemas()) {
        if (!absl::StartsWith(schema->name, bad.op)) continue;  // attention_backward as attention
        if (FindRow(schema->attributes, bad.name) == nullptr) continue;
        all->push_back({WithValue(schema->name, bad.name, bad.value), bad.name, bad.message});
      }
    }
    return all;
  }();
  return *refusals;
}

std::vector<Refusal> ValueRefusals() {
  std::vector<Refusal> refusals;
  for (const OperatorSchema* schema : OperatorSchemas()) {
    for (const AttributeSchema& attribute : schema->attributes) {
      const bool is_number = std::holds_alternative<int64_t>(attribute.kind) ||
                             std::holds_alternative<double>(attribute.kind);
      if (is_number) continue;
      const char* const value = !attribute.choices.empty()                         ? "none_such"
                                : std::holds_alternative<DType>(attribute.kind)    ? "INT8"
                                : std::holds_alternative<uint64_t>(attribute.kind) ? "-1"
                                                                                   : "2";
      refusals.push_back({WithValue(schema->name, attribute.name, value),
                          std::string(attribute.name),
                          absl::StrCat("; it must be ", AllowedValues(attribute))});
    }
  }
  return refusals;
}

std::vector<Refusal> ShapeRefusals() {
  std::vector<Refusal> refusals;
  std::map<std::string, bool> seen;
  for (const OperatorCase& c : OperatorCases()) {
    for (size_t n = 0; n < c.inputs.size(); ++n) {
      const bool is_first = seen.emplace(absl::StrCat(c.op, ".", c.inputs[n].name), true).second;
      if (!is_first) continue;
      Refusal refusal = {c, c.inputs[n].name, ""};
      CaseInput& input = refusal.call.inputs[n];
      if (input.name == "nonpad_kv_seqlen") {
        ++input.shape[0];
      } else {
        while (Bind(refusal.call).ok()) input.shape.push_back(3);
      }
      refusals.push_back(std::move(refusal));
    }
  }
  return refusals;
}

std::vector<Refusal> MissingRefusals() {
  std::vector<Refusal> refusals;
  for (const OperatorSchema* schema : OperatorSchemas()) {
    const auto c = std::find_if(OperatorCases().begin(), OperatorCases().end(),
                                [&](const OperatorCase& each) { return each.op == schema->name; });
    for (const TensorSchema& input : schema->inputs) {
      if (!input.required) continue;
      Refusal refusal = {*c, std::string(input.name), absl::StrCat(input.name, " is missing")};
      std::erase_if(refusal.call.inputs,
                    [&](const CaseInput& each) { return each.name == input.name; });
      refusals.push_back(std::move(refusal));
    }
  }
  return refusals;
}

CaseTensors InputsOf(const OperatorCase& c) {
  Rng rng(1);
  CaseTensors tensors;
  for (const CaseInput& input : c.inputs) {
    const DType type = input.type();
    int64_t count = 1;
    for (const int64_t axis : input.shape) count *= axis;
    CaseTensor& tensor = tensors[input.name] = {type, input.shape, {}};
    const auto size = static_cast<size_t>(SizeOf(type));
    tensor.bytes.resize(static_cast<size_t>(count) * size);
    for (size_t n = 0; n < input.integers.size(); ++n) {
      std::memcpy(&tensor.bytes[n * size], &input.integers[n], size);  // little-endian
    }
    if (!input.integers.empty() || count == 0) continue;
    Tensor numbers(type, {1, 1, 1, count});
    numbers.FillUniform(rng, input.low, input.high);
    std::memcpy(tensor.bytes.data(), numbers.View().data, tensor.bytes.size());
  }
  return tensors;
}

absl::StatusOr<BoundCall> Bind(const OperatorCase& c) {
  const OperatorSchema& schema = c.schema();
  const std::unique_ptr<SchemaCall> call = schema.new_call();
  for (const CaseInput& input : c.inputs) {
    call->inputs()[FindRow(schema.inputs, input.name)->slot] = {input.type(), input.shape};
  }
  for (const auto& [name, text] : c.attributes) {
    const AttributeSchema& attribute = *FindRow(schema.attributes, name);
    const absl::StatusOr<AttributeValue> value = ReadValue(attribute, GivenValue(text));
    if (!value.ok()) return value.status();
    attribute.set(*call, *value);
  }
  for (const std::string& name : c.wants) {
    const TensorSchema& output = *FindRow(schema.outputs, name);
    if (output.want != nullptr) output.want(*call);
  }
  return call->Bind();
}

absl::StatusOr<CaseTensors> Compute(const OperatorCase& c, const CaseTensors& inputs) {
  const absl::StatusOr<BoundCall> call = Bind(c);
  if (!call.ok()) return call.status();
  const OperatorSchema& schema = c.schema();
  Arguments arguments;
  for (const CaseInput& input : c.inputs) {
    const Slot slot = FindRow(schema.inputs, input.name)->slot;
    arguments.inputs[slot].data =
        reinterpret_cast<const std::byte*>(inputs.at(input.name).bytes.data());
    if (slot == Role::kKeyLengths) arguments.key_lengths = input.integers;
  }
  CaseTensors outputs;
  for (const TensorSchema& output : schema.outputs) {
    const auto& spec = call->outputs()[output.slot];
    if (!spec) continue;
    CaseTensor& tensor = outputs[std::string(output.name)] = {spec->dtype, spec->shape, {}};
    tensor.bytes.resize(static_cast<size_t>(ByteSize(output.name, *spec).value()));
    arguments.outputs[output.slot].data = reinterpret_cast<std::byte*>(tensor.bytes.data());
  }
  const Plan plan = call->MakePlan({.threads = 2}).value();
  AlignedBuffer workspace(plan.workspace_bytes());
  ThreadPool pool(2);
  EXPECT_EQ(call->Run(plan, arguments, workspace.span(), pool), absl::OkStatus());
  return outputs;
}

void ExpectReturnsTheBitsOfTheOperator(CaseInterface& interface) {
  for (const OperatorCase& c : OperatorCases()) {
    if (!interface.Carries(c)) continue;
    SCOPED_TRACE(ToText(c));
    const CaseTensors inputs = InputsOf(c);
    const CaseTensors want = Compute(c, inputs).value();
    const absl::StatusOr<CaseTensors> got = interface.Call(c, inputs);
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_EQ(got->size(), want.size());
    for (const auto& [name, tensor] : want) {
      const auto found = got->find(name);
      ASSERT_NE(found, got->end()) << name;
      EXPECT_EQ(found->second.dtype, tensor.dtype) << name;
      EXPECT_EQ(found->second.shape, tensor.shape) << name;
      EXPECT_TRUE(found->second.bytes == tensor.bytes) << name;
    }
  }
}

void ExpectNamesWhatIsRefused(CaseInterface& interface) {
  std::vector<Refusal> refusals = NumberRefusals();
  Append(ValueRefusals(), refusals);
  Append(ShapeRefusals(), refusals);
  Append(MissingRefusals(), refusals);
  for (const Refusal& refusal : refusals) {
    const OperatorCase& c = refusal.call;
    if (!interface.Carries(c)) continue;
    SCOPED_TRACE(absl::StrCat(ToText(c), ", ", refusal.name));
    const AttributeSchema* attribute = FindRow(c.schema().attributes, refusal.name);
    if (attribute != nullptr && !interface.CanExpress(c, *attribute)) continue;
    const absl::Status status = interface.Call(c, InputsOf(c)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    const std::string own = interface.NameOf(c, refusal.name);
    const std::string& name = own.empty() ? refusal.name : own;
    const std::string error(status.message());
    EXPECT_THAT(
        absl::AsciiStrToLower(error),
        ::testing::ContainsRegex(absl::StrCat(absl::AsciiStrToLower(name), "( is| has| =| \\[)")));
    if (own.empty()) {
      EXPECT_THAT(error, ::testing::HasSubstr(refusal.message));
    }
  }
}

}  // namespace rapt::test
