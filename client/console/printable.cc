#include "client/console/printable.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/utf8.h"

namespace rapt {
namespace {

// Whether a character, which is UTF-8, is one of C0, DEL or C1.
bool IsControl(absl::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (character.size() == 1) return first < ' ' || first == 0x7F;
  return first == 0xC2 && static_cast<unsigned char>(character[1]) < 0xA0;
}

}  // namespace

std::string Printable(absl::string_view text) {
  std::string printable;
  while (!text.empty()) {
    const size_t length = Utf8CharacterLength(text);
    const absl::string_view character = text.substr(0, length == 0 ? 1 : length);
    if (length != 0 && !IsControl(character)) {
      absl::StrAppend(&printable, character);
    } else {
      for (const char byte : character) {
        absl::StrAppendFormat(&printable, "\\x%02x", static_cast<unsigned char>(byte));
      }
    }
    text.remove_prefix(character.size());
  }
  return printable;
}

}  // namespace rapt
