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

// Of a tensor with fewer axes.
constexpr Dims AxesOf(int64_t a, int64_t b = 1, int64_t c = 1) { return {a, b, c, 1}; }

constexpr bool Always(const Problem&) { return true; }
template <auto kMember>
constexpr bool Has(const Problem& p) {
  return static_cast<bool>(p.*kMember);
}
template <auto kMember>
constexpr DType TypeIn(const Problem& p) {
  if constexpr (requires { (p.*kMember)->dtype; }) {
    return (p.*kMember)->dtype;
  } else {
    return *(p.*kMember);
  }
}
template <DType kType>
constexpr DType Only(const Problem&) {
  return kType;
}
constexpr bool HasValues(const Problem& p) { return !p.values_in_keys; }
constexpr bool HasPast(const Problem& p) { return p.past_length > 0; }
constexpr DType QueryType(const Problem& p) { return p.dtype; }

constexpr Dims RotaryCacheDims(const Problem& p) {
  const RotaryCache& cache = *p.rotary_cache;
  if (cache.by_position()) return {cache.rows, cache.pairs, 1, 1};
  return {*cache.batch, cache.rows, cache.pairs, 1};
}
constexpr Dims HeadDims(const Problem& p) { return AxesOf(p.query_heads); }

constexpr bool HasForward(const Problem& p) { return p.backward && p.backward->has_forward; }
DType LseType(const Problem& p) { return p.lse_dtype(); }
constexpr Dims LseDims(const Problem& p) { return QueryDims(p, 1); }
constexpr Dims OutputDims(const Problem& p) { return QueryDims(p, p.value_head_size); }

// An input with the same name in every interface, which broadcasts and which models do not list.
constexpr RoleInfo Table(Role role, absl::string_view name, const char* help, int rank,
                         bool (*wanted)(const Problem&), DType (*dtype)(const Problem&),
                         Dims (*dims)(const Problem&), DType usual_dtype = DType::kFloat32) {
  return {.role = role,
          .onnx = name,
          .native = name,
          .c = name,
          .help = help,
          .unlisted = true,
          .broadcasts = true,
          .rank = rank,
          .usual_dtype = usual_dtype,
          .wanted = wanted,
          .dtype = dtype,
          .dims = dims};
}

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
     .wanted = Has<&Problem::mask>,
     .dtype = TypeIn<&Problem::mask>,
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
     .wanted = Has<&Problem::has_key_lengths>,
     .dtype = Only<DType::kInt64>,
     .dims = [](const Problem& p) { return AxesOf(p.batch); }},
    {.role = Role::kBias,
     .onnx = "attention_bias",
     .native = "attention_bias",
     .c = "bias",
     .help = "floats added to the scores, broadcast as the mask",
     .broadcasts = true,
     .wanted = Has<&Problem::bias>,
     .dtype = TypeIn<&Problem::bias>,
     .dims = [](const Problem& p) { return p.bias->dims; }},
    {.role = Role::kHeadSink,
     .onnx = "head_sink",
     .native = "head_sink",
     .c = "head_sink",
     .help = "the score of one more key per head, without a value, [Hq]",
     .broadcasts = true,
     .rank = 1,
     .wanted = Has<&Problem::head_sink>,
     .dtype = TypeIn<&Problem::head_sink>,
     .dims = HeadDims},
    Table(Role::kAlibiSlopes, "alibi_slopes",
          "-slope*|j-p| is added to the scores, [Hq] or [B, Hq]", 2, Has<&Problem::alibi_slopes>,
          TypeIn<&Problem::alibi_slopes>,
          [](const Problem& p) { return AxesOf(p.alibi_slopes->batch, p.query_heads); }),
    Table(Role::kBiasTable, "bias_table", "T5: a bias for each bucket of distances, [N, Hq]", 2,
          Has<&Problem::bias_table>, TypeIn<&Problem::bias_table>,
          [](const Problem& p) { return AxesOf(p.bias_table->buckets, p.query_heads); }),
    Table(Role::kRelativeBias, "relative_bias",
          "a bias for each distance, clipped to [-c, c], [1 or Hq, 2c+1]", 2,
          Has<&Problem::relative_bias>, TypeIn<&Problem::relative_bias>,
          [](const Problem& p) { return AxesOf(p.relative_bias->heads, p.relative_bias->length); }),
    Table(Role::kRelativeKeys, "relative_keys",
          "added to the keys by distance, clipped to [-c, c], [1 or Hq, 2c+1, D]", 3,
          Has<&Problem::relative_keys>, TypeIn<&Problem::relative_keys>,
          [](const Problem& p) { return VectorDims(*p.relative_keys, p.head_size); }),
    Table(Role::kRelativeValues, "relative_values",
          "added to the values by distance, clipped to [-c, c], [1 or Hq, 2c+1, Dv]", 3,
          Has<&Problem::relative_values>, TypeIn<&Problem::relative_values>,
          [](const Problem& p) { return VectorDims(*p.relative_values, p.value_head_size); }),
    {.role = Role::kRelativeQuery,
     .onnx = "relative_query",
     .native = "relative_query",
     .c = "relative_query",
     .help = "queries of --relative-keys instead of Q, shaped as Q",
     .has_layout = true,
     .unlisted = true,
     .source = Source::kSliced,
     .wanted = Has<&Problem::has_relative_query>,
     .dtype = QueryType,
     .dims = [](const Problem& p) { return QueryDims(p, p.head_size); }},
    Table(Role::kCosCache, "cos_cache",
          "rotary embedding: cosines by position, [M, r/2] or [B, S, r/2]", 2,
          Has<&Problem::rotary_cache>, TypeIn<&Problem::rotary_cache>, RotaryCacheDims),
    Table(Role::kSinCache, "sin_cache", "rotary embedding: sines, as --cos-cache", 2,
          Has<&Problem::rotary_cache>, TypeIn<&Problem::rotary_cache>, RotaryCacheDims),
    Table(
        Role::kPositionIds, "position_ids",
        "rotary embedding: integer positions of the queries, [B, Sq]", 2,
        Has<&Problem::has_position_ids>, Only<DType::kInt64>,
        [](const Problem& p) { return AxesOf(p.batch, p.query_length); }, DType::kInt64),
    Table(
        Role::kKeyPositionIds, "key_position_ids",
        "rotary embedding: integer positions of the new keys, [B, Sk]", 2,
        Has<&Problem::has_key_position_ids>, Only<DType::kInt64>,
        [](const Problem& p) { return AxesOf(p.batch, p.key_length); }, DType::kInt64),
    Table(Role::kAdditiveWeight, "additive_weight",
          "weight of each element in additive scores, [1 or Hq, D]", 2,
          Has<&Problem::additive_weight>, TypeIn<&Problem::additive_weight>,
          [](const Problem& p) { return AxesOf(p.additive_weight->heads, p.head_size); }),
    Table(Role::kHeadAlpha, "head_alpha", "--alpha of each head, [Hq]", 1,
          Has<&Problem::head_alpha>, TypeIn<&Problem::head_alpha>, HeadDims),
    Table(
        Role::kBlockMask, "block_mask",
        "bool, true: these block_q queries may see these block_k keys, [1 or B, 1 or Hq, "
        "Sq/block_q, T/block_k]",
        4, Has<&Problem::block_mask>, Only<DType::kBool>,
        [](const Problem& p) { return *p.block_mask; }, DType::kBool),
    Table(
        Role::kSelectedIndices, "selected_indices",
        "INT32, the only keys that a query may see, -1: unused, [B, 1 or Hkv, Sq, N]", 4,
        Has<&Problem::selected>, Only<DType::kInt32>,
        [](const Problem& p) {
          return Dims{p.batch, p.selected->heads, p.query_length, p.selected->count};
        },
        DType::kInt32),
    Table(
        Role::kGlobalMask, "global_mask",
        "bool, true: the window hides neither this key nor keys from its query, [B, T]", 2,
        Has<&Problem::has_global_mask>, Only<DType::kBool>,
        [](const Problem& p) { return AxesOf(p.batch, p.total_keys()); }, DType::kBool),
    {.role = Role::kOutputGradient,
     .onnx = "dY",
     .native = "dy",
     .c = "output_gradient",
     .flag = "grad",
     .help = "gradient of the output, shaped as it",
     .has_layout = true,
     .source = Source::kSliced,
     .wanted = Has<&Problem::backward>,
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
     .wanted = Has<&Problem::wants_present>,
     .dtype = QueryType,
     .dims = [](const Problem& p) { return KeyDims(p, p.total_keys()); }},
    {.role = Role::kPresentValue,
     .onnx = "present_value",
     .native = "present_value",
     .c = "present_value",
     .wanted = [](const Problem& p) { return p.wants_present && HasValues(p); },
     .dtype = QueryType,
     .dims = [](const Problem& p) { return ValueDims(p, p.total_keys()); }},
    {.role = Role::kScores,
     .onnx = "qk_matmul_output",
     .native = "scores",
     .c = "scores",
     .wanted = Has<&Problem::score_output>,
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
