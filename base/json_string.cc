#include "base/json_string.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/utf8.h"

namespace rapt {

void AppendJsonString(absl::string_view text, std::string& out) {
  out += '"';
  while (!text.empty()) {
    const size_t length = Utf8CharacterLength(text);
    const auto first = static_cast<unsigned char>(text[0]);
    if (length == 0) {
      out += kReplacementCharacter;
    } else if (first == '"' || first == '\\') {
      out += {'\\', text[0]};
    } else if (first < ' ' || first == 0x7F) {
      absl::StrAppend(&out, "\\u00", absl::Hex(first, absl::kZeroPad2));
    } else {
      absl::StrAppend(&out, text.substr(0, length));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  out += '"';
}

}  // namespace rapt
