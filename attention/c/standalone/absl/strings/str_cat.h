// The subset of absl::StrCat and StrAppend that attention uses; see ../status/status.h.
#ifndef RAPT_ATTENTION_C_STANDALONE_ABSL_STRINGS_STR_CAT_H_
#define RAPT_ATTENTION_C_STANDALONE_ABSL_STRINGS_STR_CAT_H_

#include <charconv>
#include <cstddef>
#include <initializer_list>
#include <iterator>
#include <string>
#include <type_traits>

#include "absl/strings/string_view.h"

namespace absl {

// A string, or a number formatted as one; floating-point numbers like "%g" with six digits.
class AlphaNum {
 public:
  // NOLINTBEGIN(google-explicit-constructor): like Abseil's.
  AlphaNum(const char* text) : text_(text) {}
  AlphaNum(absl::string_view text) : text_(text) {}
  AlphaNum(const std::string& text) : text_(text) {}
  template <typename Integer, std::enable_if_t<std::is_integral_v<Integer>, int> = 0>
  AlphaNum(Integer value)
      : digit_count_(std::to_chars(digits_, std::end(digits_), value).ptr - digits_) {}
  AlphaNum(double value);
  // NOLINTEND(google-explicit-constructor)

  absl::string_view Piece() const {
    return digit_count_ > 0 ? absl::string_view(digits_, digit_count_) : text_;
  }

 private:
  absl::string_view text_;
  char digits_[32];
  size_t digit_count_ = 0;
};

// Out of line: errors are many, and their code should be short.
void AppendPieces(std::string* out, std::initializer_list<AlphaNum> parts);

template <typename... Parts>
void StrAppend(std::string* out, const Parts&... parts) {
  AppendPieces(out, {AlphaNum(parts)...});
}

template <typename... Parts>
std::string StrCat(const Parts&... parts) {
  std::string text;
  StrAppend(&text, parts...);
  return text;
}

}  // namespace absl

#endif  // RAPT_ATTENTION_C_STANDALONE_ABSL_STRINGS_STR_CAT_H_
