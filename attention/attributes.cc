#include "attention/attributes.h"

#include <iterator>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "attention/operator.h"
#include "attention/operator_schema.h"

namespace rapt {
namespace {

constexpr double kLargest = std::numeric_limits<double>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr AttributeInfo kTable[] = {
    {.attribute = Attribute::kQueryHeads,
     .onnx = "q_num_heads",
     .native = "attention.query_heads",
     .c = "query_heads",
     .field = AttributeField<std::optional<int64_t>>{&OperatorCall::q_num_heads},
     .help = "heads of a Q of rank 3"},
    {.attribute = Attribute::kKvHeads,
     .onnx = "kv_num_heads",
     .native = "attention.kv_heads",
     .c = "kv_heads",
     .field = AttributeField<std::optional<int64_t>>{&OperatorCall::kv_num_heads},
     .help = "heads of K and V of rank 3"},
    {.attribute = Attribute::kCausal,
     .onnx = "is_causal",
     .native = "attention.causal",
     .c = "causal",
     .field = AttributeField<bool>{&OperatorCall::is_causal, &Problem::causal},
     .flag = "causal",
     .help = "mask keys after the query"},
    {.attribute = Attribute::kLeftWindow,
     .onnx = "left_window_size",
     .native = "attention.window.left",
     .c = "left_window",
     .field = AttributeField<int64_t>{&OperatorCall::left_window_size, &Problem::left_window},
     .least = -1,
     .most = kInfinity,
     .allowed = "-1 (unbounded) or at least 0",
     .absent = -1,
     .help = "keys before the query that it sees; -1 (default): all"},
    {.attribute = Attribute::kRightWindow,
     .onnx = "right_window_size",
     .native = "attention.window.right",
     .c = "right_window",
     .field = AttributeField<int64_t>{&OperatorCall::right_window_size, &Problem::right_window},
     .least = -1,
     .most = kInfinity,
     .allowed = "-1 (unbounded) or at least 0",
     .absent = -1,
     .help = "keys after the query that it sees; -1 (default): all"},
    {.attribute = Attribute::kScale,
     .onnx = "scale",
     .native = "attention.scale",
     .c = "scale",
     .field = AttributeField<std::optional<double>>{&OperatorCall::scale, &Problem::scale},
     .least = -kLargest,
     .most = kLargest,
     .allowed = "finite",
     .flag = "scale",
     .help = "scale of the scores (default: 1/sqrt(D))"},
    {.attribute = Attribute::kSoftcap,
     .onnx = "softcap",
     .native = "attention.softcap",
     .c = "softcap",
     .field = AttributeField<double>{&OperatorCall::softcap, &Problem::softcap},
     .most = kLargest,
     .allowed = "0 (none) or positive and finite",
     .flag = "softcap",
     .help = "cap scores to X*tanh(score/X); 0: no cap (default: 0)"},
    {.attribute = Attribute::kDropoutProbability,
     .onnx = "dropout_probability",
     .native = "attention.dropout.probability",
     .c = "dropout_probability"},
    {.attribute = Attribute::kAlibi,
     .onnx = "alibi",
     .native = "attention.alibi",
     .c = "alibi",
     .field = AttributeField<bool>{&OperatorCall::alibi, &Problem::alibi},
     .flag = "alibi",
     .help = "bias by distance with the slopes of ALiBi"},
    {.attribute = Attribute::kBidirectional,
     .onnx = "is_bidirectional",
     .native = "attention.is_bidirectional",
     .c = "is_bidirectional",
     .field = AttributeField<bool>{&OperatorCall::is_bidirectional, &Problem::is_bidirectional},
     .flag = "bidirectional",
     .help = "half of the buckets of --bias-table are for later keys"},
    {.attribute = Attribute::kMaxDistance,
     .onnx = "max_distance",
     .native = "attention.max_distance",
     .c = "max_distance",
     .field = AttributeField<std::optional<int64_t>>{&OperatorCall::max_distance,
                                                     &Problem::max_distance},
     .least = 1,
     .most = kInfinity,
     .allowed = "at least 1",
     .flag = "max-distance",
     .help = "distances from N on share the last bucket of --bias-table (default: 128)"},
    {.attribute = Attribute::kValueHeadSize,
     .onnx = "v_head_size",
     .native = "attention.v_head_size",
     .c = "values_in_keys",
     .field = AttributeField<std::optional<int64_t>>{&OperatorCall::v_head_size},
     .flag = "v-head-size",
     .help = "without --v: V is the first N numbers of each row of K"},
    {.attribute = Attribute::kInterleaved,
     .onnx = "interleaved",
     .native = "attention.interleaved",
     .c = "interleaved",
     .field = AttributeField<bool>{&OperatorCall::interleaved, &Problem::interleaved},
     .flag = "interleaved",
     .help = "rotary embedding: rotate neighbours, not the two halves"},
    {.attribute = Attribute::kRotaryDim,
     .onnx = "rotary_embedding_dim",
     .native = "attention.rotary_embedding_dim",
     .c = "rotary_embedding_dim",
     .field = AttributeField<int64_t>{&OperatorCall::rotary_embedding_dim,
                                      &Problem::rotary_embedding_dim},
     .most = kInfinity,
     .allowed = "0 (the head size) or positive and even",
     .flag = "rotary-embedding-dim",
     .help = "rotary embedding: rotate the first N numbers of each head (default: all)"},
    {.attribute = Attribute::kRopeTheta,
     .onnx = "rope_theta",
     .native = "attention.rope_theta",
     .c = "rope_theta",
     .field =
         AttributeField<std::optional<double>>{&OperatorCall::rope_theta, &Problem::rope_theta},
     .least = std::numeric_limits<double>::denorm_min(),
     .most = kLargest,
     .allowed = "positive and finite",
     .flag = "rope-theta",
     .help = "rotary embedding with angles position * X^(-2t/r), without --cos-cache"},
    {.attribute = Attribute::kRotaryKeys,
     .onnx = "rotary_keys",
     .native = "attention.rotary_keys",
     .c = "rotary_keys",
     .field =
         AttributeField<std::optional<bool>>{&OperatorCall::rotary_keys, &Problem::rotary_keys},
     .help = "false: the keys are rotated already"},
    {.attribute = Attribute::kScoreFunction,
     .onnx = "score_function",
     .native = "attention.score_function",
     .c = "score_function",
     .field =
         AttributeField<ScoreFunction>{&OperatorCall::score_function, &Problem::score_function},
     .choices = kNamesOf<ScoreFunction>,
     .most = static_cast<double>(kNamesOf<ScoreFunction>.size() - 1),
     .allowed = "dot_product or additive",
     .flag = "score-function",
     .help = "dot_product (default) or additive, which needs --additive-weight"},
    {.attribute = Attribute::kNormalizer,
     .onnx = "normalizer",
     .native = "attention.normalizer",
     .c = "normalizer",
     .field = AttributeField<Normalizer>{&OperatorCall::normalizer, &Problem::normalizer},
     .choices = kNamesOf<Normalizer>,
     .most = static_cast<double>(kNamesOf<Normalizer>.size() - 1),
     .allowed = "softmax, sparsemax, entmax15 or entmax",
     .flag = "normalizer",
     .help = "softmax (default), sparsemax, entmax15 or entmax, which needs --alpha"},
    {.attribute = Attribute::kAlpha,
     .onnx = "alpha",
     .native = "attention.alpha",
     .c = "alpha",
     .field = AttributeField<std::optional<double>>{&OperatorCall::alpha, &Problem::alpha},
     .least = 1,
     .most = 2,
     .allowed = "from 1 (softmax) to 2 (sparsemax)",
     .flag = "alpha",
     .help = "of --normalizer entmax: 1 (softmax) to 2 (sparsemax)"},
    {.attribute = Attribute::kBlockQ,
     .onnx = "block_q",
     .native = "attention.block_q",
     .c = "block_q",
     .field = AttributeField<std::optional<int64_t>>{&OperatorCall::block_q, &Problem::block_q},
     .least = 1,
     .most = kInfinity,
     .allowed = "at least 1",
     .flag = "block-q",
     .help = "queries of an entry of --block-mask"},
    {.attribute = Attribute::kBlockK,
     .onnx = "block_k",
     .native = "attention.block_k",
     .c = "block_k",
     .field = AttributeField<std::optional<int64_t>>{&OperatorCall::block_k, &Problem::block_k},
     .least = 1,
     .most = kInfinity,
     .allowed = "at least 1",
     .flag = "block-k",
     .help = "keys of an entry of --block-mask"},
    {.attribute = Attribute::kPrefixKeys,
     .onnx = "prefix_keys",
     .native = "attention.prefix_keys",
     .c = "prefix_keys",
     .field = AttributeField<int64_t>{&OperatorCall::prefix_keys, &Problem::prefix_keys},
     .most = kInfinity,
     .allowed = "at least 0",
     .flag = "prefix-keys",
     .help = "the window does not hide the first N keys (default: 0)"},
};

constexpr bool IsIndexedByAttribute() {
  for (size_t n = 0; n < std::size(kTable); ++n) {
    if (kTable[n].attribute != static_cast<Attribute>(n)) return false;
  }
  return std::size(kTable) == kAttributes;
}
static_assert(IsIndexedByAttribute(), "every attribute has a row, in the enumerators' order");

constexpr bool HasMember(const AttributeInfo& info) {
  return std::visit([](const auto& field) { return field.problem != nullptr; }, info.field);
}
constexpr bool RangesHaveMembers() {
  for (const AttributeInfo& info : kTable) {
    if (!info.allowed.empty() && !HasMember(info)) return false;
  }
  return true;
}
static_assert(RangesHaveMembers(), "Validate() compares members of Problem with the ranges");

template <size_t kIndex>
void AppendRow(std::vector<AttributeSchema>& rows) {
  constexpr const AttributeInfo& kInfo = kTable[kIndex];
  constexpr auto kMember = std::get<kInfo.field.index()>(kInfo.field).call;
  if constexpr (kMember != nullptr) {
    rows.push_back(AttributeOf<kMember>(kInfo.onnx, kInfo.help == nullptr ? "" : kInfo.help));
    rows.back().takes_value =
        std::is_same_v<decltype(kMember), std::optional<bool> OperatorCall::*const>;
  }
}

template <size_t... kIndices>
void AppendRows(std::vector<AttributeSchema>& rows, std::index_sequence<kIndices...>) {
  (AppendRow<kIndices>(rows), ...);
}

}  // namespace

absl::Span<const AttributeInfo> Attributes() { return kTable; }

std::vector<AttributeSchema> AttentionAttributes() {
  std::vector<AttributeSchema> rows;
  AppendRows(rows, std::make_index_sequence<kAttributes>());
  return rows;
}

}  // namespace rapt
