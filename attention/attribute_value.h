// Values of attributes, as callers give them and as a call has them.
#ifndef RAPT_ATTENTION_ATTRIBUTE_VALUE_H_
#define RAPT_ATTENTION_ATTRIBUTE_VALUE_H_

#include <cstdint>
#include <string>
#include <variant>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "rapt/data_type.h"

namespace rapt {

// As a caller gives it: a protocol, a function of the C interface or a flag.
using GivenValue = std::variant<bool, int64_t, uint64_t, double, absl::string_view>;

// Read a value as one of another type: a whole number also as a real one, 0 and 1 also as bools,
// and a text as what it says. A float type is its name, "FP16", or the code that ONNX has for it.
// They return false if it is none.
bool ReadValue(const GivenValue& given, bool& out);
bool ReadValue(const GivenValue& given, int64_t& out);
bool ReadValue(const GivenValue& given, uint64_t& out);
bool ReadValue(const GivenValue& given, double& out);
bool ReadValue(const GivenValue& given, DType& out);
// The same for the index of a name.
bool ReadValue(const GivenValue& given, absl::Span<const absl::string_view> names, uint8_t& out);

// What they accept.
template <typename T>
constexpr absl::string_view kAllowedValues;
template <>
inline constexpr absl::string_view kAllowedValues<bool> = "true, false, 1 or 0";
template <>
inline constexpr absl::string_view kAllowedValues<int64_t> = "a whole number of 64 bits";
template <>
inline constexpr absl::string_view kAllowedValues<uint64_t> = "a whole number of at least 0";
template <>
inline constexpr absl::string_view kAllowedValues<double> = "a number";
template <>
inline constexpr absl::string_view kAllowedValues<DType> =
    "FP32, FP16, BF16 or FP64, or its code in ONNX";
std::string AllowedValues(absl::Span<const absl::string_view> names);  // "reformer or simple"

// "true", "2.5", "'fast'"
std::string ToString(const GivenValue& given);

}  // namespace rapt

#endif  // RAPT_ATTENTION_ATTRIBUTE_VALUE_H_
