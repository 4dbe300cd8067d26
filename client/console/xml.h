// Text in XML and HTML documents.
#ifndef RAPT_CLIENT_CONSOLE_XML_H_
#define RAPT_CLIENT_CONSOLE_XML_H_

#include <string>

#include "absl/strings/string_view.h"

namespace rapt {

// Escapes text for elements and quoted attributes. Control characters, U+FFFE, U+FFFF and bytes
// that are not UTF-8 become U+FFFD, because XML 1.0 cannot contain them.
std::string EscapeXml(absl::string_view text);

}  // namespace rapt

#endif  // RAPT_CLIENT_CONSOLE_XML_H_
