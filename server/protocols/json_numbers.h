// Numbers of tensors in JSON.
#ifndef RAPT_SERVER_PROTOCOLS_JSON_NUMBERS_H_
#define RAPT_SERVER_PROTOCOLS_JSON_NUMBERS_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "absl/strings/string_view.h"
#include "attention/operator.h"

namespace rapt {

// A value that is neither null nor an array nor an object, as parsers give it.
using JsonScalar = std::variant<bool, int64_t, uint64_t, double, absl::string_view>;

// Returns the value for an error: "1e+39", "'abc'".
std::string TextOf(const JsonScalar& value);

// Returns the integer; nullopt if it is none or exceeds int64_t.
std::optional<int64_t> IntegerOf(const JsonScalar& value);

struct JsonNumbers {
  // Stores an element; returns false if the type does not have the value.
  bool (*store)(const JsonScalar& value, std::byte* place) = nullptr;
  absl::string_view allowed;  // "it must be an integer within the type"
};

// Numbers that are not finite are "NaN", "Infinity" and "-Infinity", as in ProtoJSON.
JsonNumbers JsonNumbersOf(DType dtype);

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_JSON_NUMBERS_H_
