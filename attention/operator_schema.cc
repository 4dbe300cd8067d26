#include "attention/operator_schema.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <string>
#include <system_error>
#include <type_traits>
#include <variant>

#include "attention/mechanism/linear/linear_attention.h"
#include "attention/mechanism/lsh/lsh_attention.h"
#include "attention/positions/positional_encoding.h"
#include "attention/positions/rotary_embedding.h"
#include "base/invalid.h"

namespace rapt {
namespace {

// Reads all of `text` as a number. Without Abseil's functions, which the C library lacks.
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

constexpr absl::string_view AllowedOf(bool) { return "true, false, 1 or 0"; }
constexpr absl::string_view AllowedOf(int64_t) { return "a 64-bit integer"; }
constexpr absl::string_view AllowedOf(uint64_t) { return "an integer from 0 to 2^64 - 1"; }
constexpr absl::string_view AllowedOf(double) { return "a number"; }
constexpr absl::string_view AllowedOf(DType) { return "FP32, FP16, BF16 or FP64"; }

absl::Status WrongValue(const AttributeSchema& attribute, absl::string_view text,
                        absl::string_view allowed) {
  return Invalid(attribute.name, " is '", text, "'; it must be ", allowed);
}

absl::StatusOr<AttributeValue> ParseChoice(const AttributeSchema& attribute,
                                           absl::string_view text) {
  const auto choice = std::find(attribute.choices.begin(), attribute.choices.end(), text);
  if (choice != attribute.choices.end()) {
    return AttributeValue(static_cast<uint8_t>(choice - attribute.choices.begin()));
  }
  std::string allowed;
  for (const absl::string_view name : attribute.choices) {
    if (!allowed.empty()) allowed += " or ";
    allowed.append(name.data(), name.size());
  }
  return WrongValue(attribute, text, allowed);
}

}  // namespace

absl::Span<const OperatorSchema* const> OperatorSchemas() {
  static constexpr const OperatorSchema* kAll[] = {&kRotaryEmbedding, &kPositionalEncoding,
                                                   &kLinearAttention, &kLshAttention};
  return kAll;
}

const OperatorSchema* FindOperator(absl::string_view name) {
  const auto all = OperatorSchemas();
  const auto found = std::find_if(
      all.begin(), all.end(), [&](const OperatorSchema* schema) { return schema->name == name; });
  return found == all.end() ? nullptr : *found;
}

absl::StatusOr<AttributeValue> ParseValue(const AttributeSchema& attribute,
                                          absl::string_view text) {
  AttributeValue value = attribute.kind;
  const auto parse = [&](auto& out) -> absl::StatusOr<AttributeValue> {
    if constexpr (std::is_same_v<std::decay_t<decltype(out)>, uint8_t>) {
      return ParseChoice(attribute, text);
    } else {
      if (!Parse(text, out)) return WrongValue(attribute, text, AllowedOf(out));
      return AttributeValue(out);
    }
  };
  return std::visit(parse, value);
}

}  // namespace rapt
