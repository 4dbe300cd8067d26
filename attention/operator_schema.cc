#include "attention/operator_schema.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <variant>

#include "absl/strings/str_cat.h"
#include "attention/mechanism/linear/linear_attention.h"
#include "attention/mechanism/lsh/lsh_attention.h"
#include "attention/positions/positional_encoding.h"
#include "attention/positions/rotary_embedding.h"
#include "base/invalid.h"

namespace rapt {
namespace {

// Reads all of `text` as a number. librapt_attention.so does not link Abseil's functions for it.
template <typename Number>
bool ParseNumber(absl::string_view text, Number& out) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, out);
  return error == std::errc() && stop == end;
}

bool Parse(absl::string_view text, bool& out) {
  out = text == "true" || text == "1";
  return out || text == "false" || text == "0";
}
bool Parse(absl::string_view text, int64_t& out) { return ParseNumber(text, out); }
bool Parse(absl::string_view text, uint64_t& out) { return ParseNumber(text, out); }
bool Parse(absl::string_view text, double& out) { return ParseNumber(text, out); }
bool Parse(absl::string_view text, DType& out) {
  const std::optional<DType> dtype = DTypeNamed(text);
  if (dtype) out = *dtype;
  return dtype && IsFloat(*dtype);
}

// By the alternatives of AttributeValue; a choice has names of its own.
constexpr absl::string_view kAllowed[] = {"true, false, 1 or 0", "a whole number of 64 bits",
                                          "a whole number of at least 0", "a number",
                                          "FP32, FP16, BF16 or FP64"};

}  // namespace

absl::Span<const OperatorSchema* const> OperatorSchemas() {
  static constexpr const OperatorSchema* kAll[] = {&kRotaryEmbedding, &kPositionalEncoding,
                                                   &kLinearAttention, &kLshAttention};
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
  if (attribute.choices.empty()) return absl::StrCat(kAllowed[attribute.kind.index()]);
  std::string names;
  for (const absl::string_view name : attribute.choices) {
    absl::StrAppend(&names, names.empty() ? "" : " or ", name);
  }
  return names;
}

absl::StatusOr<AttributeValue> ParseValue(const AttributeSchema& attribute,
                                          absl::string_view text) {
  AttributeValue value = attribute.kind;
  const auto parse = [&](auto& out) {
    if constexpr (std::is_same_v<std::decay_t<decltype(out)>, uint8_t>) {
      const auto choice = std::find(attribute.choices.begin(), attribute.choices.end(), text);
      out = static_cast<uint8_t>(choice - attribute.choices.begin());
      return choice != attribute.choices.end();
    } else {
      return Parse(text, out);
    }
  };
  if (std::visit(parse, value)) return value;
  return Invalid(attribute.name, " is '", text, "'; it must be ", AllowedValues(attribute));
}

}  // namespace rapt
