#include "client/console/xml.h"

#include <cstddef>

#include "absl/strings/str_cat.h"
#include "base/utf8.h"

namespace rapt {
namespace {

// Whether XML 1.0 may contain the character, which is UTF-8 (production 2 of the recommendation).
bool MayContain(absl::string_view character) {
  const auto first = static_cast<unsigned char>(character[0]);
  if (first < ' ') return first == '\t' || first == '\n' || first == '\r';
  return character != "\xEF\xBF\xBE" && character != "\xEF\xBF\xBF";
}

absl::string_view Escaped(absl::string_view character) {
  switch (character[0]) {
    case '&':
      return "&amp;";
    case '<':
      return "&lt;";
    case '>':
      return "&gt;";
    case '"':
      return "&quot;";
    case '\'':
      return "&#39;";
    default:
      return character;
  }
}

}  // namespace

std::string EscapeXml(absl::string_view text) {
  std::string escaped;
  while (!text.empty()) {
    const size_t length = Utf8CharacterLength(text);
    const absl::string_view character = text.substr(0, length);
    if (length == 0 || !MayContain(character)) {
      absl::StrAppend(&escaped, kReplacementCharacter);
    } else {
      absl::StrAppend(&escaped, Escaped(character));
    }
    text.remove_prefix(length == 0 ? 1 : length);
  }
  return escaped;
}

}  // namespace rapt
