#include <algorithm>
#include <string>
#include <utility>

#include "attention/layer/layer.h"
#include "attention/layer/layer_operator.h"
#include "attention/layer/layer_shape.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

constexpr std::pair<Slot, const char*> kNames[] = {{Role::kQ, "query"},
                                                   {Role::kK, "key"},
                                                   {Role::kV, "value"},
                                                   {Role::kMask, "attn_mask"},
                                                   {Role::kKeyLengths, "nonpad_kv_seqlen"},
                                                   {kInputIds, "input_ids"}};

absl::Status CheckSizes(const LayerCall& call) {
  for (const auto& [slot, name] : kNames) {
    const std::optional<TensorSpec>& input = call.inputs[slot];
    if (!input) continue;
    RAPT_RETURN_IF_ERROR(ByteSize(name, *input).status());
  }
  return absl::OkStatus();
}

absl::Status ReadQuery(const LayerCall& call, LayerShape& s) {
  if (!call.inputs[Role::kQ]) return Invalid("query is missing");
  const TensorSpec& query = *call.inputs[Role::kQ];
  if (!IsFloat(query.dtype)) {
    return Invalid("query has type ", NameOf(query.dtype), "; it must be FP32, FP16, BF16 or FP64");
  }
  if (s.layer->is_fp64() && query.dtype != DType::kFloat64) {
    return Invalid("query has type ", NameOf(query.dtype),
                   "; it must be FP64, because the layer has weights of FP64");
  }
  if (query.shape.size() != 3 || query.shape[2] != s.config().embed_size) {
    return Invalid("query has shape ", ToString(query.shape), "; it must be [B, Sq, ",
                   s.config().embed_size, "]");
  }
  s.dtype = query.dtype;
  s.batch = query.shape[0];
  s.queries = query.shape[1];
  s.tokens = s.queries;
  return absl::OkStatus();
}

// Key or value, which must have `size` numbers a token. Absent: the input before it, of `before`.
absl::Status CheckKeys(const char* name, const std::optional<TensorSpec>& input, int64_t size,
                       const char* default_name, int64_t default_size, const LayerShape& s) {
  if (!input) {
    if (size == default_size) return absl::OkStatus();
    return Invalid(name, " is missing; ", default_name, " can't replace it, because it has ",
                   default_size, " numbers a token, not ", size);
  }
  if (input->dtype != s.dtype) {
    return Invalid(name, " has type ", NameOf(input->dtype), "; it must have that of query, ",
                   NameOf(s.dtype));
  }
  const Shape want = {s.batch, s.tokens, size};
  if (input->shape == want) return absl::OkStatus();
  return Invalid(name, " has shape ", ToString(input->shape), "; it must be ", ToString(want));
}

absl::Status ReadKeys(const LayerCall& call, LayerShape& s) {
  const LayerConfig& c = s.config();
  const auto& key = call.inputs[Role::kK];
  const auto& value = call.inputs[Role::kV];
  s.has_key = key.has_value();
  s.has_value = value.has_value();
  // The number of keys is key's to say, or value's.
  for (const auto* input : {&value, &key}) {
    if (*input && (*input)->shape.size() == 3) s.tokens = (*input)->shape[1];
  }
  if (!s.has_key && s.has_value) s.tokens = s.queries;
  RAPT_RETURN_IF_ERROR(CheckKeys("key", key, *c.key_embed_size, "query", c.embed_size, s));
  return CheckKeys("value", value, *c.value_embed_size, s.has_key ? "key" : "query",
                   s.has_key ? *c.key_embed_size : c.embed_size, s);
}

absl::Status ReadMask(const LayerCall& call, LayerShape& s) {
  const std::optional<TensorSpec>& mask = call.inputs[Role::kMask];
  if (!mask) return absl::OkStatus();
  const Shape& shape = mask->shape;
  if (shape.empty() || shape.size() > 4) {
    return Invalid("attn_mask has shape ", ToString(shape), "; it must have from 1 to 4 axes");
  }
  s.mask = MaskShape{mask->dtype, {1, 1, 1, 1}};
  std::copy_backward(shape.begin(), shape.end(), s.mask->dims.end());
  return absl::OkStatus();
}

absl::Status CheckInt64(const char* name, const TensorSpec& tensor, const Shape& want) {
  if (tensor.dtype == DType::kInt64 && tensor.shape == want) return absl::OkStatus();
  return Invalid(name, " is ", NameOf(tensor.dtype), " ", ToString(tensor.shape),
                 "; it must be INT64 ", ToString(want));
}

absl::Status ReadPadding(const LayerCall& call, LayerShape& s) {
  if (const auto& lengths = call.inputs[Role::kKeyLengths]) {
    s.has_lengths = true;
    RAPT_RETURN_IF_ERROR(CheckInt64("nonpad_kv_seqlen", *lengths, {s.batch}));
  }
  const auto& ids = call.inputs[kInputIds];
  if (!ids) return absl::OkStatus();
  if (!s.config().pad_token_id) {
    return Invalid("input_ids is given, but the layer's configuration has no pad_token_id");
  }
  s.has_ids = true;
  return CheckInt64("input_ids", *ids, {s.batch, s.tokens});
}

// Attention's own checks: of mask, dropout, rotary embedding and sizes.
absl::Status CheckAttention(const LayerShape& s) {
  Problem p = AttentionOf(s);
  // As the caller gave them.
  p.mask = s.mask;
  p.bias.reset();
  if (s.mask) p.mask->dims[3] = std::min(s.mask->dims[3], s.keys());
  if (s.mask && s.mask->dims[3] > s.tokens) {
    return Invalid("attn_mask has a last axis of ", s.mask->dims[3], "; it must be at most ",
                   s.tokens, ", the number of keys");
  }
  return Validate(p, LayerNames());
}

absl::StatusOr<LayerShape> ShapeOf(std::shared_ptr<const Layer> layer, const LayerCall& call) {
  LayerShape shape{.layer = std::static_pointer_cast<const PackedLayer>(std::move(layer)),
                   .dropout = call.dropout,
                   .wants_weights = call.wants_weights,
                   .wants_averaged_weights = call.wants_averaged_weights,
                   .cache = call.cache};
  shape.is_causal = call.is_causal.value_or(shape.config().is_causal);
  if (shape.config().sliding_window && !shape.is_causal) {
    return Invalid("is_causal is false; it must be true, because the layer has sliding_window ",
                   *shape.config().sliding_window);
  }
  RAPT_RETURN_IF_ERROR(CheckSizes(call));
  RAPT_RETURN_IF_ERROR(ReadQuery(call, shape));
  RAPT_RETURN_IF_ERROR(ReadKeys(call, shape));
  RAPT_RETURN_IF_ERROR(ReadMask(call, shape));
  RAPT_RETURN_IF_ERROR(ReadPadding(call, shape));
  RAPT_RETURN_IF_ERROR(CheckAttention(shape));
  if (!FitsMemory(shape)) {
    return Invalid("query has shape ", ToString(call.inputs[Role::kQ]->shape), " and there are ",
                   shape.keys(), " keys; the layer then needs more than 2^50 bytes of memory");
  }
  return shape;
}

// What a call with a cache must not have.
absl::Status CheckCachedCall(const LayerShape& s, const LayerCall& call) {
  const struct {
    bool is_given;
    const char* what;
  } refused[] = {
      {s.has_key, "key is given; with a cache the layer is self-attention"},
      {s.has_value, "value is given; with a cache the layer is self-attention"},
      {call.inputs[Role::kMask].has_value(), "attn_mask is given; a cache does not keep masks"},
      {s.has_lengths, "nonpad_kv_seqlen is given; a cache has no padding"},
      {s.has_ids, "input_ids is given; a cache has no padding"},
      {s.dropout.has_value(), "dropout_probability is given; there is no dropout with a cache"},
      {s.wants_weights || s.wants_averaged_weights,
       "output weights is requested; with a cache there is only Y"},
      {!s.is_causal,
       "is_causal is false; keys of a layer with a cache are those of earlier tokens"},
  };
  for (const auto& [is_given, what] : refused) {
    if (is_given) return Invalid(what);
  }
  if (s.batch == 1 && s.queries > 0) return absl::OkStatus();
  return Invalid("query has shape ", ToString(call.inputs[Role::kQ]->shape),
                 "; with a cache it must be [1, Sq, ", s.config().embed_size, "] with a token");
}

}  // namespace

absl::Status CheckCache(const Layer& layer) {
  const LayerConfig& c = layer.config();
  if (c.score_function != ScoreFunction::kDotProduct) {
    return Invalid("the layer has additive scores; a cache needs dot products");
  }
  if (static_cast<const PackedLayer&>(layer).weights().has(Vector::kExtraKey)) {
    return Invalid("the layer has bias_k, a key after all others; a cache has no such key");
  }
  for (const auto& [name, size] : {std::pair{"key_embed_size", *c.key_embed_size},
                                   {"value_embed_size", *c.value_embed_size}}) {
    if (size == c.embed_size) continue;
    return Invalid("the layer has ", name, " ", size, " and embed_size ", c.embed_size,
                   "; with a cache the layer is self-attention");
  }
  return absl::OkStatus();
}

absl::StatusOr<RaggedCall> CachedAttentionOf(std::shared_ptr<const Layer> layer,
                                             const LayerCall& call) {
  RAPT_RETURN_IF_ERROR(CheckCache(*layer));
  RAPT_ASSIGN_OR_RETURN(const LayerShape shape, ShapeOf(std::move(layer), call));
  RAPT_RETURN_IF_ERROR(CheckCachedCall(shape, call));
  const Problem p = AttentionOf(shape);
  return RaggedCall{.items = {{.rows = p.query_length, .left_window = p.left_window}},
                    .dtype = p.dtype,
                    .query_heads = p.query_heads,
                    .kv_heads = p.kv_heads,
                    .head_size = p.head_size,
                    .value_head_size = p.value_head_size,
                    .scale = p.scale,
                    .head_sink = p.head_sink,
                    .bias_table = p.bias_table,
                    .max_distance = p.max_distance};
}

absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeLayerCall(
    std::shared_ptr<const Layer> layer, const LayerCall& call) {
  RAPT_ASSIGN_OR_RETURN(const LayerShape shape, ShapeOf(std::move(layer), call));
  std::shared_ptr<const TensorOperator> op = MakeLayerOperator(shape);
  RAPT_RETURN_IF_ERROR(ByteSize("Y", *op->outputs()[Role::kY]).status());
  return op;
}

}  // namespace rapt
