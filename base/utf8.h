// Characters of external text that is echoed in messages and documents.
#ifndef RAPT_BASE_UTF8_H_
#define RAPT_BASE_UTF8_H_

#include <cstddef>

#include "absl/strings/string_view.h"

namespace rapt {

// U+FFFD, which stands for bytes that are not UTF-8.
inline constexpr char kReplacementCharacter[] = "\xEF\xBF\xBD";

// Returns the length of the character at the beginning of `text` (Unicode, table 3-7), or 0 if it
// is not UTF-8. REQUIRES: `text` is not empty.
size_t Utf8CharacterLength(absl::string_view text);

// Returns the longest prefix of `text` that fits `max_bytes` and ends at a character boundary,
// because Protocol Buffers rejects strings with a partial character. REQUIRES: `text` is UTF-8.
inline absl::string_view Utf8Prefix(absl::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  const auto is_continuation = [](char byte) {
    return (static_cast<unsigned char>(byte) & 0xC0) == 0x80;
  };
  size_t end = max_bytes;
  while (end > 0 && is_continuation(text[end])) --end;
  return text.substr(0, end);
}

}  // namespace rapt

#endif  // RAPT_BASE_UTF8_H_
