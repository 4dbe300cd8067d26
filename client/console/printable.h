// Text from files and servers as a terminal may show it.
#ifndef RAPT_CLIENT_CONSOLE_PRINTABLE_H_
#define RAPT_CLIENT_CONSOLE_PRINTABLE_H_

#include <string>

#include "absl/strings/string_view.h"

namespace rapt {

// Replaces the bytes of control characters, which command a terminal, and bytes that are not UTF-8:
// "\x1b[31m".
std::string Printable(absl::string_view text);

}  // namespace rapt

#endif  // RAPT_CLIENT_CONSOLE_PRINTABLE_H_
