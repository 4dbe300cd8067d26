#include "attention/roles.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <utility>

#include "attention/problem.h"

namespace rapt {
namespace {

using Dims = std::array<int64_t, 4>;

constexpr Dims QueryDims(const Problem& p, int64_t size) {
  return {p.batch, p.query_heads, p.query_length, size};
}
constexpr Dims KeyDims(const Problem& p, int64_t length) {
  return {p.batch, p.kv_heads, length, p.head_size};
}
constexpr Dims ValueDims(const Problem& p, int64_t length) {
  return {p.batch, p.kv_heads, length, p.value_head_size};
}

constexpr Dims VectorDims(const RelativeVectors& vectors, int64_t size) {
  return {vectors.heads, vectors.length, size, 1};
}

constexpr bool Always(const Problem&) { return true; }
constexpr bool HasValues(const Problem& p) { return !p.values_in_keys; }
constexpr bool HasPast(const Problem& p) { return p.past_length > 0; }
constexpr bool WantsPresent(const Problem& p) { return p.wants_present; }
constexpr DType QueryType(const Problem& p) { return p.dtype; }

constexpr bool HasRotaryCache(const Problem& p) { return p.rotary_cache.has_value(); }
constexpr DType RotaryCacheType(const Problem& p) { return p.rotary_cache->dtype; }
constexpr Dims RotaryCacheDims(const Problem& p) {
  const RotaryCache& cache = *p.rotary_cache;
  if (cache.by_position()) return {cache.rows, cache.pairs, 1, 1};
  return {*cache.batch, cache.rows, cache.pairs, 1};
}
constexpr DType Integer(const Problem&) { return DType::kInt64; }

constexpr bool HasForward(const Problem& p) { return p.backward && p.backward->has_forward; }
DType LseType(const Problem& p) { return p.lse_dtype(); }
constexpr Dims LseDims(const Problem& p) { return QueryDims(p, 1); }
constexpr Dims OutputDims(const Problem& p) { return QueryDims(p, p.value_head_size); }

constexpr RoleInfo kForwardRoles[] = {
    {.role = Role::kQ,
     .onnx = "Q",
     .native = "q",
     .c = "query",
     .help = "queries; without --k and --v also keys and values",
     .required = true,
     .has_layout = true,
     .source = Source::kSliced,
     .wanted = Always,
     .dtype = QueryType,
     .dims = [](const Problem& p) { return QueryDims(p, p.head_size); }},
    {.role = Role::kK,
     .onnx = "K",
     .native = "k",
     .c = "key",
     .help = "keys",
     .required = true,
     .has_layout = true,
     .source = Source::kPaged,
     .wanted = Always,
     .dtype = QueryType,
     .dims = [](const Problem& p) { return KeyDims(p, p.key_length); }},
    {.role = Role::kV,
     .onnx = "V",
     .native = "v",
     .c = "value",
     .help = "values",
     .required = true,
     .has_layout = true,
     .source = Source::kPaged,
     .wanted = HasValues,
     .dtype = QueryType,
     .dims = [](const Problem& p) { return ValueDims(p, p.key_length); }},
    {.role = Role::kMask,
     .onnx = "attn_mask",
     .native = "mask",
     .c = "mask",
     .help = "bool or integers 0 and 1 (1: attend), or floats (added to the scores)",
     .broadcasts = true,
     .usual_dtype = DType::kBool,
     .wanted = [](const Problem& p) { return p.mask.has_value(); },
     .dtype = [](const Problem& p) { return p.mask->dtype; },
     .dims = [](const Problem& p) { return p.mask->dims; }},
    {.role = Role::kPastKey,
     .onnx = "past_key",
     .native = "past_key",
     .c = "past_key",
     .help = "past keys, [B, Hkv, P, D]",
     .source = Source::kPaged,
     .wanted = HasPast,
     .dtype = QueryType,
     .dims = [](const Problem& p) { return KeyDims(p, p.past_length); }},
    {.role = Role::kPastValue,
     .onnx = "past_value",
     .native = "past_value",
     .c = "past_value",
     .help = "past values, [B, Hkv, P, Dv]",
     .source = Source::kPaged,
     .wanted = [](const Problem& p) { return HasPast(p) && HasValues(p); },
     .dtype = QueryType,
     .dims = [](const Problem& p) { return ValueDims(p, p.past_length); }},
    {.role = Role::kKeyLengths,
     .onnx = "nonpad_kv_seqlen",
     .native = "key_lengths",
     .c = "key_lengths",
     .help = "number of valid keys of each batch row, [B]",
     .rank = 1,
     .usual_dtype = DType::kInt64,
     .wanted = [](const Problem& p) { return p.has_key_lengths; },
     .dtype = [](const Problem&) { return DType::kInt64; },
     .dims =
         [](const Problem& p) {
           return Dims{p.batch, 1, 1, 1};
         }},
    {.role = Role::kBias,
     .onnx = "attention_bias",
     .native = "attention_bias",
     .c = "bias",
     .help = "floats added to the scores, broadcast as the mask",
     .broadcasts = true,
     .wanted = [](const Problem& p) { return p.bias.has_value(); },
     .dtype = [](const Problem& p) { return p.bias->dtype; },
     .dims = [](const Problem& p) { return p.bias->dims; }},
    {.role = Role::kHeadSink,
     .onnx = "head_sink",
     .native = "head_sink",
     .c = "head_sink",
     .help = "the score of one more key per head, without a value, [Hq]",
     .broadcasts = true,
     .rank = 1,
     .wanted = [](const Problem& p) { return p.head_sink.has_value(); },
     .dtype = [](const Problem& p) { return *p.head_sink; },
     .dims =
         [](const Problem& p) {
           return Dims{p.query_heads, 1, 1, 1};
         }},
    {.role = Role::kAlibiSlopes,
     .onnx = "alibi_slopes",
     .native = "alibi_slopes",
     .c = "alibi_slopes",
     .help = "-slope*|j-p| is added to the scores, [Hq] or [B, Hq]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 2,
     .wanted = [](const Problem& p) { return p.alibi_slopes.has_value(); },
     .dtype = [](const Problem& p) { return p.alibi_slopes->dtype; },
     .dims =
         [](const Problem& p) {
           return Dims{p.alibi_slopes->batch, p.query_heads, 1, 1};
         }},
    {.role = Role::kBiasTable,
     .onnx = "bias_table",
     .native = "bias_table",
     .c = "bias_table",
     .help = "T5: a bias for each bucket of distances, [N, Hq]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 2,
     .wanted = [](const Problem& p) { return p.bias_table.has_value(); },
     .dtype = [](const Problem& p) { return p.bias_table->dtype; },
     .dims =
         [](const Problem& p) {
           return Dims{p.bias_table->buckets, p.query_heads, 1, 1};
         }},
    {.role = Role::kRelativeBias,
     .onnx = "relative_bias",
     .native = "relative_bias",
     .c = "relative_bias",
     .help = "a bias for each distance, clipped to [-c, c], [1 or Hq, 2c+1]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 2,
     .wanted = [](const Problem& p) { return p.relative_bias.has_value(); },
     .dtype = [](const Problem& p) { return p.relative_bias->dtype; },
     .dims =
         [](const Problem& p) {
           return Dims{p.relative_bias->heads, p.relative_bias->length, 1, 1};
         }},
    {.role = Role::kRelativeKeys,
     .onnx = "relative_keys",
     .native = "relative_keys",
     .c = "relative_keys",
     .help = "added to the keys by distance, clipped to [-c, c], [1 or Hq, 2c+1, D]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 3,
     .wanted = [](const Problem& p) { return p.relative_keys.has_value(); },
     .dtype = [](const Problem& p) { return p.relative_keys->dtype; },
     .dims = [](const Problem& p) { return VectorDims(*p.relative_keys, p.head_size); }},
    {.role = Role::kRelativeValues,
     .onnx = "relative_values",
     .native = "relative_values",
     .c = "relative_values",
     .help = "added to the values by distance, clipped to [-c, c], [1 or Hq, 2c+1, Dv]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 3,
     .wanted = [](const Problem& p) { return p.relative_values.has_value(); },
     .dtype = [](const Problem& p) { return p.relative_values->dtype; },
     .dims = [](const Problem& p) { return VectorDims(*p.relative_values, p.value_head_size); }},
    {.role = Role::kRelativeQuery,
     .onnx = "relative_query",
     .native = "relative_query",
     .c = "relative_query",
     .help = "queries of --relative-keys instead of Q, shaped as Q",
     .has_layout = true,
     .unlisted = true,
     .source = Source::kSliced,
     .wanted = [](const Problem& p) { return p.has_relative_query; },
     .dtype = QueryType,
     .dims = [](const Problem& p) { return QueryDims(p, p.head_size); }},
    {.role = Role::kCosCache,
     .onnx = "cos_cache",
     .native = "cos_cache",
     .c = "cos_cache",
     .help = "rotary embedding: cosines by position, [M, r/2] or [B, S, r/2]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 2,
     .wanted = HasRotaryCache,
     .dtype = RotaryCacheType,
     .dims = RotaryCacheDims},
    {.role = Role::kSinCache,
     .onnx = "sin_cache",
     .native = "sin_cache",
     .c = "sin_cache",
     .help = "rotary embedding: sines, as --cos-cache",
     .unlisted = true,
     .broadcasts = true,
     .rank = 2,
     .wanted = HasRotaryCache,
     .dtype = RotaryCacheType,
     .dims = RotaryCacheDims},
    {.role = Role::kPositionIds,
     .onnx = "position_ids",
     .native = "position_ids",
     .c = "position_ids",
     .help = "rotary embedding: integer positions of the queries, [B, Sq]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 2,
     .usual_dtype = DType::kInt64,
     .wanted = [](const Problem& p) { return p.has_position_ids; },
     .dtype = Integer,
     .dims =
         [](const Problem& p) {
           return Dims{p.batch, p.query_length, 1, 1};
         }},
    {.role = Role::kKeyPositionIds,
     .onnx = "key_position_ids",
     .native = "key_position_ids",
     .c = "key_position_ids",
     .help = "rotary embedding: integer positions of the new keys, [B, Sk]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 2,
     .usual_dtype = DType::kInt64,
     .wanted = [](const Problem& p) { return p.has_key_position_ids; },
     .dtype = Integer,
     .dims =
         [](const Problem& p) {
           return Dims{p.batch, p.key_length, 1, 1};
         }},
    {.role = Role::kAdditiveWeight,
     .onnx = "additive_weight",
     .native = "additive_weight",
     .c = "additive_weight",
     .help = "weight of each element in additive scores, [1 or Hq, D]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 2,
     .wanted = [](const Problem& p) { return p.additive_weight.has_value(); },
     .dtype = [](const Problem& p) { return p.additive_weight->dtype; },
     .dims =
         [](const Problem& p) {
           return Dims{p.additive_weight->heads, p.head_size, 1, 1};
         }},
    {.role = Role::kHeadAlpha,
     .onnx = "head_alpha",
     .native = "head_alpha",
     .c = "head_alpha",
     .help = "--alpha of each head, [Hq]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 1,
     .wanted = [](const Problem& p) { return p.head_alpha.has_value(); },
     .dtype = [](const Problem& p) { return *p.head_alpha; },
     .dims =
         [](const Problem& p) {
           return Dims{p.query_heads, 1, 1, 1};
         }},
    {.role = Role::kBlockMask,
     .onnx = "block_mask",
     .native = "block_mask",
     .c = "block_mask",
     .help = "bool, true: these block_q queries may see these block_k keys, [1 or B, 1 or Hq, "
             "Sq/block_q, T/block_k]",
     .unlisted = true,
     .broadcasts = true,
     .usual_dtype = DType::kBool,
     .wanted = [](const Problem& p) { return p.block_mask.has_value(); },
     .dtype = [](const Problem&) { return DType::kBool; },
     .dims = [](const Problem& p) { return *p.block_mask; }},
    {.role = Role::kSelectedIndices,
     .onnx = "selected_indices",
     .native = "selected_indices",
     .c = "selected_indices",
     .help = "INT32, the only keys that a query may see, -1: unused, [B, 1 or Hkv, Sq, N]",
     .unlisted = true,
     .broadcasts = true,
     .usual_dtype = DType::kInt32,
     .wanted = [](const Problem& p) { return p.selected.has_value(); },
     .dtype = [](const Problem&) { return DType::kInt32; },
     .dims =
         [](const Problem& p) {
           return Dims{p.batch, p.selected->heads, p.query_length, p.selected->count};
         }},
    {.role = Role::kGlobalMask,
     .onnx = "global_mask",
     .native = "global_mask",
     .c = "global_mask",
     .help = "bool, true: the window hides neither this key nor keys from its query, [B, T]",
     .unlisted = true,
     .broadcasts = true,
     .rank = 2,
     .usual_dtype = DType::kBool,
     .wanted = [](const Problem& p) { return p.has_global_mask; },
     .dtype = [](const Problem&) { return DType::kBool; },
     .dims =
         [](const Problem& p) {
           return Dims{p.batch, p.total_keys(), 1, 1};
         }},
    {.role = Role::kOutputGradient,
     .onnx = "dY",
     .native = "dy",
     .c = "output_gradient",
     .flag = "grad",
     .help = "gradient of the output, shaped as it",
     .has_layout = true,
     .source = Source::kSliced,
     .wanted = [](const Problem& p) { return p.backward.has_value(); },
     .dtype = QueryType,
     .dims = OutputDims},
    {.role = Role::kForwardOutput,
     .onnx = "Y",
     .native = "y",
     .c = "forward_output",
     .flag = "forward-output",
     .help = "output of the forward pass; without it, it is computed again",
     .has_layout = true,
     .source = Source::kSliced,
     .wanted = HasForward,
     .dtype = QueryType,
     .dims = OutputDims},
    {.role = Role::kForwardLse,
     .onnx = "lse",
     .native = "lse",
     .c = "forward_lse",
     .flag = "forward-lse",
     .help = "lse of the forward pass, with --forward-output",
     .rank = 3,
     .wanted = HasForward,
     .dtype = LseType,
     .dims = LseDims},
    {.role = Role::kLseGradient,
     .onnx = "dlse",
     .native = "dlse",
     .c = "lse_gradient",
     .flag = "lse-grad",
     .help = "gradient of lse, [B, Hq, Sq]",
     .rank = 3,
     .wanted = [](const Problem& p) { return p.backward && p.backward->has_lse_gradient; },
     .dtype = LseType,
     .dims = LseDims},
    {.role = Role::kY,
     .onnx = "Y",
     .native = "y",
     .c = "output",
     .required = true,
     .has_layout = true,
     .wanted = [](const Problem& p) { return !p.folds && !p.backward; },
     .dtype = QueryType,
     .dims = OutputDims},
    {.role = Role::kPresentKey,
     .onnx = "present_key",
     .native = "present_key",
     .c = "present_key",
     .wanted = WantsPresent,
     .dtype = QueryType,
     .dims = [](const Problem& p) { return KeyDims(p, p.total_keys()); }},
    {.role = Role::kPresentValue,
     .onnx = "present_value",
     .native = "present_value",
     .c = "present_value",
     .wanted = [](const Problem& p) { return WantsPresent(p) && HasValues(p); },
     .dtype = QueryType,
     .dims = [](const Problem& p) { return ValueDims(p, p.total_keys()); }},
    {.role = Role::kScores,
     .onnx = "qk_matmul_output",
     .native = "scores",
     .c = "scores",
     .wanted = [](const Problem& p) { return p.score_output.has_value(); },
     .dtype = QueryType,
     .dims = [](const Problem& p) { return QueryDims(p, p.total_keys()); }},
    {.role = Role::kLse,
     .onnx = "lse",
     .native = "lse",
     .c = "lse",
     .rank = 3,
     .wanted = [](const Problem& p) { return p.wants_lse && !p.folds; },
     .dtype = LseType,
     .dims = LseDims},
};

// The row of the gradient of an input, with the input's axes and type.
template <Role kGradient>
constexpr RoleInfo GradientOf(Role input, absl::string_view onnx, absl::string_view native,
                              absl::string_view c) {
  RoleInfo info = kForwardRoles[static_cast<size_t>(input)];
  info.role = kGradient;
  info.onnx = onnx;
  info.native = native;
  info.c = c;
  info.flag = nullptr;
  info.help = nullptr;
  info.required = false;
  info.source = Source::kStrided;
  info.usual_dtype = DType::kFloat32;
  info.wanted = [](const Problem& p) {
    return p.backward && p.backward->gradients.contains(kGradient);
  };
  info.gradient_of = input;
  return info;
}

constexpr RoleInfo kGradientRoles[] = {
    GradientOf<Role::kDQ>(Role::kQ, "dQ", "dq", "d_query"),
    GradientOf<Role::kDK>(Role::kK, "dK", "dk", "d_key"),
    GradientOf<Role::kDV>(Role::kV, "dV", "dv", "d_value"),
    GradientOf<Role::kDMask>(Role::kMask, "d_attn_mask", "d_mask", "d_mask"),
    GradientOf<Role::kDPastKey>(Role::kPastKey, "d_past_key", "d_past_key", "d_past_key"),
    GradientOf<Role::kDPastValue>(Role::kPastValue, "d_past_value", "d_past_value", "d_past_value"),
    GradientOf<Role::kDBias>(Role::kBias, "d_attention_bias", "d_attention_bias", "d_bias"),
    GradientOf<Role::kDHeadSink>(Role::kHeadSink, "d_head_sink", "d_head_sink", "d_head_sink"),
    GradientOf<Role::kDAlibiSlopes>(Role::kAlibiSlopes, "d_alibi_slopes", "d_alibi_slopes",
                                    "d_alibi_slopes"),
    GradientOf<Role::kDBiasTable>(Role::kBiasTable, "d_bias_table", "d_bias_table", "d_bias_table"),
    GradientOf<Role::kDRelativeBias>(Role::kRelativeBias, "d_relative_bias", "d_relative_bias",
                                     "d_relative_bias"),
    GradientOf<Role::kDRelativeKeys>(Role::kRelativeKeys, "d_relative_keys", "d_relative_keys",
                                     "d_relative_keys"),
    GradientOf<Role::kDRelativeValues>(Role::kRelativeValues, "d_relative_values",
                                       "d_relative_values", "d_relative_values"),
    GradientOf<Role::kDRelativeQuery>(Role::kRelativeQuery, "d_relative_query", "d_relative_query",
                                      "d_relative_query"),
    GradientOf<Role::kDAdditiveWeight>(Role::kAdditiveWeight, "d_additive_weight",
                                       "d_additive_weight", "d_additive_weight"),
};

constexpr auto kRoles = [] {
  std::array<RoleInfo, static_cast<size_t>(Role::kEnd)> roles;
  static_assert(std::size(kForwardRoles) + std::size(kGradientRoles) == roles.size());
  std::copy(std::begin(kForwardRoles), std::end(kForwardRoles), roles.begin());
  std::copy(std::begin(kGradientRoles), std::end(kGradientRoles),
            roles.begin() + std::size(kForwardRoles));
  return roles;
}();

constexpr bool IsIndexedByRole() {
  for (size_t n = 0; n < std::size(kRoles); ++n) {
    if (kRoles[n].role != static_cast<Role>(n)) return false;
  }
  return std::size(kRoles) == static_cast<size_t>(Role::kEnd);
}
static_assert(IsIndexedByRole(), "every role has a row, in the order of the enumerators");

// The index of each row is a constant: then `wanted` is inlined. Calls through its pointer, which
// processors mispredict, take a tenth of the time of a call with 16 queries and keys.
template <const auto& kAmong, size_t... kIndices>
RoleSet Wanted(const Problem& problem, std::index_sequence<kIndices...>) {
  RoleSet roles;
  (roles.Add(kAmong[kIndices], kRoles[static_cast<size_t>(kAmong[kIndices])].wanted(problem)), ...);
  return roles;
}

template <const auto& kAmong>
RoleSet Wanted(const Problem& problem) {
  return Wanted<kAmong>(problem, std::make_index_sequence<kAmong.size()>());
}

}  // namespace

const RoleInfo& InfoOf(Role role) { return kRoles[static_cast<size_t>(role)]; }

RoleSet InputTensorsOf(const Problem& problem) {
  RoleSet roles = Wanted<kInputTensors>(problem);
  if (problem.backward) roles.Add(Wanted<kBackwardInputs>(problem));
  return roles;
}

RoleSet OutputsOf(const Problem& problem) {
  return problem.backward ? Wanted<kGradients>(problem) : Wanted<kOutputs>(problem);
}

}  // namespace rapt
