#include "attention/attributes.h"

#include <iterator>
#include <limits>
#include <variant>

#include "attention/operator.h"

namespace rapt {
namespace {

constexpr double kLargest = std::numeric_limits<double>::max();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

constexpr AttributeInfo kTable[] = {
    {.attribute = Attribute::kQueryHeads,
     .onnx = "q_num_heads",
     .native = "attention.query_heads",
     .c = "query_heads",
     .field = AttributeField<std::optional<int64_t>>{&OperatorCall::q_num_heads}},
    {.attribute = Attribute::kKvHeads,
     .onnx = "kv_num_heads",
     .native = "attention.kv_heads",
     .c = "kv_heads",
     .field = AttributeField<std::optional<int64_t>>{&OperatorCall::kv_num_heads}},
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
     .absent = -1},
    {.attribute = Attribute::kRightWindow,
     .onnx = "right_window_size",
     .native = "attention.window.right",
     .c = "right_window",
     .field = AttributeField<int64_t>{&OperatorCall::right_window_size, &Problem::right_window},
     .least = -1,
     .most = kInfinity,
     .allowed = "-1 (unbounded) or at least 0",
     .absent = -1},
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
     .onnx = "dropout probability",
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

}  // namespace

absl::Span<const AttributeInfo> Attributes() { return kTable; }

}  // namespace rapt
