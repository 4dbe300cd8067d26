#include "client/console/text.h"

#include <cmath>
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

std::string HumanBytes(int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double value = static_cast<double>(bytes);
  size_t unit = 0;
  for (; std::abs(value) >= 1024; ++unit) value /= 1024;
  return absl::StrFormat("%.4g %s", value, kUnits[unit]);
}

}  // namespace rapt
