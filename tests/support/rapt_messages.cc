#include "tests/support/rapt_messages.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "attention/half.h"

namespace rapt::test {
namespace {

using Coordinates = std::function<void(int64_t b, int64_t h, int64_t s, int64_t e)>;

// Calls `visit` for every element in the order of the layout.
void ForEach(const Dims& dims, v1::Layout layout, const Coordinates& visit) {
  const bool heads_first = layout == v1::BHSD;
  const int64_t outer = heads_first ? dims[1] : dims[2];
  const int64_t inner = heads_first ? dims[2] : dims[1];
  for (int64_t b = 0; b < dims[0]; ++b) {
    for (int64_t m = 0; m < outer; ++m) {
      for (int64_t n = 0; n < inner; ++n) {
        for (int64_t e = 0; e < dims[3]; ++e) {
          heads_first ? visit(b, m, n, e) : visit(b, n, m, e);
        }
      }
    }
  }
}

std::vector<int64_t> ShapeOf(const Dims& d, v1::Layout layout) {
  if (layout == v1::BSHD) return {d[0], d[2], d[1], d[3]};
  if (layout == v1::BSE) return {d[0], d[2], d[1] * d[3]};
  return {d[0], d[1], d[2], d[3]};
}

v1::ScoreOutput CodeOf(ScoreOutput output) {
  return static_cast<v1::ScoreOutput>(static_cast<int>(output) + 1);
}

void WriteAttention(const Problem& p, v1::Layout layout, v1::Attention& attention) {
  attention.set_layout(layout);
  if (layout == v1::BSE) {
    attention.set_query_heads(p.query_heads);
    attention.set_kv_heads(p.kv_heads);
  }
  if (p.scale) attention.set_scale(*p.scale);
  attention.set_softcap(p.softcap);
  attention.set_causal(p.causal);
  attention.set_alignment(static_cast<v1::Alignment>(p.alignment));
  if (p.left_window >= 0) attention.mutable_window()->set_left(p.left_window);
  if (p.right_window >= 0) attention.mutable_window()->set_right(p.right_window);
  attention.set_softmax_in_fp64(p.softmax_in_fp64);
  if (p.values_in_keys) attention.set_v_head_size(p.value_head_size);
  attention.set_score_function(p.is_additive() ? v1::ADDITIVE : v1::DOT_PRODUCT);
  attention.set_alibi(p.alibi);
  attention.set_is_bidirectional(p.is_bidirectional);
  if (p.max_distance) attention.set_max_distance(*p.max_distance);
  attention.set_interleaved(p.interleaved);
  attention.set_rotary_embedding_dim(p.rotary_embedding_dim);
  if (p.rope_theta) attention.set_rope_theta(*p.rope_theta);
  if (p.rotary_keys) attention.set_rotary_keys(*p.rotary_keys);
  attention.set_normalizer(static_cast<v1::Normalizer>(p.normalizer));
  if (p.alpha) attention.set_alpha(*p.alpha);
  if (p.block_q) attention.set_block_q(*p.block_q);
  if (p.block_k) attention.set_block_k(*p.block_k);
  attention.set_prefix_keys(p.prefix_keys);
  if (p.dropout) {
    attention.mutable_dropout()->set_probability(p.dropout->probability);
    attention.mutable_dropout()->set_seed(p.dropout->seed);
  }
}

}  // namespace

v1::DataType CodeOf(DType dtype) {
  v1::DataType code = v1::DATA_TYPE_UNSPECIFIED;
  EXPECT_TRUE(v1::DataType_Parse(std::string(NameOf(dtype)), &code)) << NameOf(dtype);
  return code;
}

Tensor FromBytes(const std::string& name, const std::string& bytes, DType dtype, const Dims& dims,
                 v1::Layout layout) {
  Tensor tensor(dtype, dims);
  EXPECT_EQ(static_cast<int64_t>(bytes.size()), tensor.size() * SizeOf(dtype)) << name;
  if (::testing::Test::HasFailure()) return tensor;
  const auto* data = reinterpret_cast<const std::byte*>(bytes.data());
  int64_t index = 0;
  ForEach(dims, layout, [&](int64_t b, int64_t h, int64_t s, int64_t e) {
    tensor.Set(b, h, s, e, LoadElement(data, dtype, index++));
  });
  return tensor;
}

v1::Tensor ToMessage(const Tensor& tensor, v1::Layout layout) {
  v1::Tensor message;
  const int64_t element_bytes = SizeOf(tensor.dtype());
  message.set_dtype(CodeOf(tensor.dtype()));
  const std::vector<int64_t> shape = ShapeOf(tensor.dims(), layout);
  message.mutable_shape()->Assign(shape.begin(), shape.end());
  std::string data(tensor.size() * element_bytes, '\0');
  auto* bytes = reinterpret_cast<std::byte*>(data.data());
  int64_t index = 0;
  ForEach(tensor.dims(), layout, [&](int64_t b, int64_t h, int64_t s, int64_t e) {
    const double value = tensor.At(b, h, s, e);
    if (tensor.dtype() == DType::kBool) {
      bytes[index++] = static_cast<std::byte>(value != 0);
    } else if (tensor.dtype() == DType::kInt64) {
      const auto integer = static_cast<int64_t>(value);
      std::memcpy(bytes + element_bytes * index++, &integer, sizeof(integer));
    } else if (tensor.dtype() == DType::kInt32) {
      const auto integer = static_cast<int32_t>(value);
      std::memcpy(bytes + index++ * sizeof(integer), &integer, sizeof(integer));
    } else {
      StoreElement(bytes, tensor.dtype(), index++, value);
    }
  });
  message.set_data(std::move(data));
  return message;
}

v1::AttendRequest ToMessage(const Problem& p, const Inputs& inputs, v1::Layout layout) {
  v1::AttendRequest message;
  *message.mutable_q() = ToMessage(inputs.query, layout);
  *message.mutable_k() = ToMessage(inputs.key, layout);
  if (!p.values_in_keys) *message.mutable_v() = ToMessage(inputs.value, layout);
  if (inputs.mask) *message.mutable_mask() = ToMessage(*inputs.mask);
  if (inputs.past_key) *message.mutable_past_key() = ToMessage(*inputs.past_key);
  if (inputs.past_value && !p.values_in_keys)
    *message.mutable_past_value() = ToMessage(*inputs.past_value);
  if (inputs.bias) *message.mutable_attention_bias() = ToMessage(*inputs.bias);
  if (inputs.head_sink) {
    *message.mutable_head_sink() = ToMessage(*inputs.head_sink);
    message.mutable_head_sink()->mutable_shape()->Truncate(1);  // [Hq]
  }
  if (inputs.head_alpha) {
    *message.mutable_head_alpha() = ToMessage(*inputs.head_alpha);
    message.mutable_head_alpha()->mutable_shape()->Truncate(1);
  }
  const auto write_table = [](const std::optional<Tensor>& table,
                              v1::Tensor* (v1::AttendRequest::*field)(), v1::AttendRequest& out,
                              int rank = 2) {
    if (!table) return;
    v1::Tensor& tensor = *(out.*field)();
    tensor = ToMessage(*table);
    tensor.mutable_shape()->Truncate(rank);
  };
  write_table(inputs.alibi_slopes, &v1::AttendRequest::mutable_alibi_slopes, message);
  write_table(inputs.bias_table, &v1::AttendRequest::mutable_bias_table, message);
  write_table(inputs.relative_bias, &v1::AttendRequest::mutable_relative_bias, message);
  write_table(inputs.relative_keys, &v1::AttendRequest::mutable_relative_keys, message, 3);
  write_table(inputs.relative_values, &v1::AttendRequest::mutable_relative_values, message, 3);
  if (inputs.relative_query) {
    *message.mutable_relative_query() = ToMessage(*inputs.relative_query, layout);
  }
  const int rank = p.rotary_cache && p.rotary_cache->batch ? 3 : 2;
  write_table(inputs.cos_cache, &v1::AttendRequest::mutable_cos_cache, message, rank);
  write_table(inputs.sin_cache, &v1::AttendRequest::mutable_sin_cache, message, rank);
  write_table(inputs.position_ids, &v1::AttendRequest::mutable_position_ids, message);
  write_table(inputs.key_position_ids, &v1::AttendRequest::mutable_key_position_ids, message);
  write_table(inputs.additive_weight, &v1::AttendRequest::mutable_additive_weight, message);
  write_table(inputs.global_mask, &v1::AttendRequest::mutable_global_mask, message);
  if (inputs.block_mask) *message.mutable_block_mask() = ToMessage(*inputs.block_mask);
  if (inputs.selected) *message.mutable_selected_indices() = ToMessage(*inputs.selected);
  message.mutable_key_lengths()->Assign(inputs.key_lengths.begin(), inputs.key_lengths.end());
  WriteAttention(p, layout, *message.mutable_attention());
  if (p.score_output) message.set_score_output(CodeOf(*p.score_output));
  message.set_want_lse(p.wants_lse);
  message.set_want_present(p.wants_present);
  return message;
}

}  // namespace rapt::test
