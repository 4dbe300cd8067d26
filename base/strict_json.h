// JSON from clients and files, read by RFC 8259 to the letter. The one place that parses it.
#ifndef RAPT_BASE_STRICT_JSON_H_
#define RAPT_BASE_STRICT_JSON_H_

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace rapt {

// Deeper values are errors, so that functions that recurse over a document can't overflow the
// stack.
inline constexpr size_t kMaxJsonDepth = 64;
// Of all objects around a value together. Their hashes are kept to find names that occur twice.
inline constexpr size_t kMaxJsonMembers = size_t{1} << 17;

enum class JsonNumberSyntax : uint8_t {
  kFinite,
  kNonFinite,  // NaN, Infinity and -Infinity are numbers as well, as Python writes them
};

// Receives the parts of a document in their order. A function that returns false ends reading.
class JsonHandler : public nlohmann::json_sax<nlohmann::json> {
 public:
  // The document is not valid: "line 1, column 5 (byte 5): ..." or "inputs.shape is given twice".
  // The last call.
  virtual void OnInvalid(absl::string_view why) = 0;

 private:
  bool binary(binary_t&) final { return false; }  // not in JSON
  bool parse_error(size_t, const std::string&, const nlohmann::json::exception&) final {
    return false;
  }
};

// Reads a document. These are invalid besides syntax errors: anything but white space after the
// value, a NUL byte anywhere, an object with a name that occurs twice, a number beyond double, and
// documents beyond the limits above. Returns whether it was read whole.
bool ReadStrictJson(absl::string_view text, JsonHandler& handler,
                    JsonNumberSyntax numbers = JsonNumberSyntax::kFinite);

// Returns the document, or InvalidArgument.
absl::StatusOr<nlohmann::json> ParseStrictJson(
    absl::string_view text, JsonNumberSyntax numbers = JsonNumberSyntax::kFinite);

}  // namespace rapt

#endif  // RAPT_BASE_STRICT_JSON_H_
