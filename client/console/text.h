// Text for terminals and documents.
#ifndef RAPT_CLIENT_CONSOLE_TEXT_H_
#define RAPT_CLIENT_CONSOLE_TEXT_H_

#include <cstdint>
#include <string>

#include "absl/strings/string_view.h"

namespace rapt {

// Replaces the bytes of control characters, which command a terminal, and bytes that are not UTF-8:
// "\x1b[31m".
std::string Printable(absl::string_view text);

// Escapes text for elements and quoted attributes. Control characters, U+FFFE, U+FFFF and bytes
// that are not UTF-8 become U+FFFD, because XML 1.0 cannot contain them.
std::string EscapeXml(absl::string_view text);

// "256 MiB", "-1.5 GiB"
std::string HumanBytes(int64_t bytes);

}  // namespace rapt

#endif  // RAPT_CLIENT_CONSOLE_TEXT_H_
