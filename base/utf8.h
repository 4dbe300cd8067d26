// Text from outside that comes back in messages.
#ifndef RAPT_BASE_UTF8_H_
#define RAPT_BASE_UTF8_H_

#include <cstddef>

#include "absl/strings/string_view.h"

namespace rapt {

// As much of the beginning of `text`, which is UTF-8, as fits `max_bytes`, in whole characters:
// Protocol Buffers refuse a message with a part of one.
inline absl::string_view BeginningOf(absl::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  const auto goes_on = [](char byte) { return (static_cast<unsigned char>(byte) & 0xC0) == 0x80; };
  size_t end = max_bytes;
  while (end > 0 && goes_on(text[end])) --end;
  return text.substr(0, end);
}

}  // namespace rapt

#endif  // RAPT_BASE_UTF8_H_
