#include "attention/roles.h"

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

constexpr bool Always(const Problem&) { return true; }
constexpr bool HasValues(const Problem& p) { return !p.values_in_keys; }
constexpr bool HasPast(const Problem& p) { return p.past_length > 0; }
constexpr bool WantsPresent(const Problem& p) { return p.wants_present; }
constexpr DType QueryType(const Problem& p) { return p.dtype; }

constexpr RoleInfo kRoles[] = {
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
     .exclusive = true,
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
     .exclusive = true,
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
     .exclusive = true,
     .broadcasts = true,
     .rank = 2,
     .wanted = [](const Problem& p) { return p.relative_bias.has_value(); },
     .dtype = [](const Problem& p) { return p.relative_bias->dtype; },
     .dims =
         [](const Problem& p) {
           return Dims{p.relative_bias->heads, p.relative_bias->length, 1, 1};
         }},
    {.role = Role::kY,
     .onnx = "Y",
     .native = "y",
     .c = "output",
     .required = true,
     .has_layout = true,
     .wanted = [](const Problem& p) { return !p.folds; },
     .dtype = QueryType,
     .dims = [](const Problem& p) { return QueryDims(p, p.value_head_size); }},
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
     .dtype = [](const Problem& p) { return p.lse_dtype(); },
     .dims = [](const Problem& p) { return QueryDims(p, 1); }},
};

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

RoleSet InputTensorsOf(const Problem& problem) { return Wanted<kInputTensors>(problem); }
RoleSet OutputsOf(const Problem& problem) { return Wanted<kOutputs>(problem); }

}  // namespace rapt
