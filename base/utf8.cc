#include "base/utf8.h"

#include <cstdint>

namespace rapt {
namespace {

// The first code point that UTF-8 encodes in n bytes.
constexpr uint32_t kFirstCodePoint[] = {0, 0, 0x80, 0x800, 0x10000};

size_t LengthBy(unsigned char first) {
  if (first < 0x80) return 1;
  if (first >= 0xC2 && first < 0xE0) return 2;
  if (first >= 0xE0 && first < 0xF0) return 3;
  return first >= 0xF0 && first < 0xF5 ? 4 : 0;
}

}  // namespace

size_t Utf8CharacterLength(absl::string_view text) {
  const auto first = static_cast<unsigned char>(text[0]);
  const size_t length = LengthBy(first);
  if (length <= 1) return length;
  if (length > text.size()) return 0;
  uint32_t code = first & (0xFFU >> (length + 1));
  for (size_t i = 1; i < length; ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    if ((byte & 0xC0) != 0x80) return 0;
    code = code << 6 | (byte & 0x3F);
  }
  const bool is_surrogate = code >= 0xD800 && code < 0xE000;
  return code < kFirstCodePoint[length] || code > 0x10FFFF || is_surrogate ? 0 : length;
}

}  // namespace rapt
