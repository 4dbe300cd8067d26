#include "attention/attribute_value.h"

#include <algorithm>
#include <charconv>
#include <optional>
#include <system_error>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"

namespace rapt {
namespace {

// Reads all of `text` as a number. librapt_attention.so does not link Abseil's functions for it.
template <typename Number>
bool ParseNumber(absl::string_view text, Number& out) {
  const char* const end = text.data() + text.size();
  const auto [stop, error] = std::from_chars(text.data(), end, out);
  return error == std::errc() && stop == end;
}

// Of a text beyond the range of a double: 0 or infinity.
bool ParseReal(absl::string_view text, double& out) {
  if (ParseNumber(text, out)) return true;
  long double wide = 0;
  if (!ParseNumber(text, wide)) return false;
  out = static_cast<double>(wide);
  return true;
}

template <typename Integer>
bool ReadInteger(const GivenValue& given, Integer& out) {
  const auto read = [&out](const auto& value) {
    using Type = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Type, absl::string_view>) {
      return ParseNumber(value, out);
    } else if constexpr (std::is_same_v<Type, int64_t> || std::is_same_v<Type, uint64_t>) {
      if (!std::in_range<Integer>(value)) return false;
      out = static_cast<Integer>(value);
      return true;
    } else {
      return false;
    }
  };
  return std::visit(read, given);
}

}  // namespace

bool ReadValue(const GivenValue& given, bool& out) {
  if (const bool* value = std::get_if<bool>(&given)) {
    out = *value;
    return true;
  }
  if (const auto* text = std::get_if<absl::string_view>(&given)) {
    out = *text == "true" || *text == "1";
    return out || *text == "false" || *text == "0";
  }
  int64_t number = 0;
  if (!ReadInteger(given, number) || number < 0 || number > 1) return false;
  out = number == 1;
  return true;
}

bool ReadValue(const GivenValue& given, int64_t& out) { return ReadInteger(given, out); }
bool ReadValue(const GivenValue& given, uint64_t& out) { return ReadInteger(given, out); }

bool ReadValue(const GivenValue& given, double& out) {
  const auto read = [&out](const auto& value) {
    using Type = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Type, absl::string_view>) {
      return ParseReal(value, out);
    } else if constexpr (std::is_same_v<Type, bool>) {
      return false;
    } else {
      out = static_cast<double>(value);
      return true;
    }
  };
  return std::visit(read, given);
}

bool ReadValue(const GivenValue& given, DType& out) {
  const auto* const text = std::get_if<absl::string_view>(&given);
  int64_t code = -1;
  ReadInteger(given, code);
  const auto found = std::find_if(kDTypes.begin(), kDTypes.end(), [&](const DTypeInfo& info) {
    return info.is_float && (info.onnx == code || (text != nullptr && info.name == *text));
  });
  if (found == kDTypes.end()) return false;
  out = found->dtype;
  return true;
}

bool ReadValue(const GivenValue& given, absl::Span<const absl::string_view> names, uint8_t& out) {
  const auto* const text = std::get_if<absl::string_view>(&given);
  if (text == nullptr) return false;
  const auto name = std::find(names.begin(), names.end(), *text);
  if (name == names.end()) return false;
  out = static_cast<uint8_t>(name - names.begin());
  return true;
}

std::string AllowedValues(absl::Span<const absl::string_view> names) {
  std::string text;
  for (const absl::string_view name : names)
    absl::StrAppend(&text, text.empty() ? "" : " or ", name);
  return text;
}

std::string ToString(const GivenValue& given) {
  const auto print = [](const auto& value) {
    using Type = std::decay_t<decltype(value)>;
    if constexpr (std::is_same_v<Type, absl::string_view>) {
      return absl::StrCat("'", value, "'");
    } else if constexpr (std::is_same_v<Type, bool>) {
      return std::string(value ? "true" : "false");
    } else {
      return absl::StrCat(value);
    }
  };
  return std::visit(print, given);
}

}  // namespace rapt
