#include "attention/operator_schema.h"

#include <algorithm>
#include <string>
#include <type_traits>
#include <variant>

#include "absl/strings/str_cat.h"
#include "attention/attention_schema.h"
#include "attention/mechanism/linear/linear_attention.h"
#include "attention/mechanism/lsh/lsh_attention.h"
#include "attention/positions/positional_encoding.h"
#include "attention/positions/rotary_embedding.h"
#include "base/invalid.h"

namespace rapt {

absl::Span<const OperatorSchema* const> OperatorSchemas() {
  static const OperatorSchema* const kAll[] = {&AttentionSchema(), &AttentionBackwardSchema(),
                                               &kRotaryEmbedding,  &kPositionalEncoding,
                                               &kLinearAttention,  &kLshAttention};
  return kAll;
}

std::string OperatorNames() {
  std::string names;
  for (const OperatorSchema* schema : OperatorSchemas()) {
    absl::StrAppend(&names, names.empty() ? "" : ", ", schema->name);
  }
  return names;
}

const OperatorSchema* FindOperator(absl::string_view name) {
  const auto all = OperatorSchemas();
  const auto found = std::find_if(
      all.begin(), all.end(), [&](const OperatorSchema* schema) { return schema->name == name; });
  return found == all.end() ? nullptr : *found;
}

std::string AllowedValues(const AttributeSchema& attribute) {
  if (!attribute.allowed.empty()) return std::string(attribute.allowed);
  const auto allowed = [&](auto type) {
    if constexpr (std::is_same_v<decltype(type), uint8_t>) {
      return AllowedValues(attribute.choices);
    } else {
      return std::string(kAllowedValues<decltype(type)>);
    }
  };
  return std::visit(allowed, attribute.kind);
}

absl::Status NoOutput(const TensorSchema& output) {
  if (!output.replaced_by.empty()) {
    return Invalid("output ", output.name, " is requested; there is none with ",
                   output.replaced_by);
  }
  return Invalid("output ", output.name, " is requested; it needs ", output.follows);
}

absl::StatusOr<AttributeValue> ReadValue(const AttributeSchema& attribute,
                                         const GivenValue& given) {
  AttributeValue value = attribute.kind;
  const auto read = [&](auto& out) {
    if constexpr (std::is_same_v<std::decay_t<decltype(out)>, uint8_t>) {
      return ReadValue(given, attribute.choices, out);
    } else {
      return ReadValue(given, out);
    }
  };
  const auto is_within = [&] {
    const auto* const whole = std::get_if<int64_t>(&value);
    return whole == nullptr || (*whole >= attribute.least && *whole <= attribute.most);
  };
  if (std::visit(read, value) && is_within()) return value;
  return Invalid(attribute.name, " is ", ToString(given), "; it must be ",
                 AllowedValues(attribute));
}

}  // namespace rapt
