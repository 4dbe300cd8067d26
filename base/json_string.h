#ifndef RAPT_BASE_JSON_STRING_H_
#define RAPT_BASE_JSON_STRING_H_

#include <string>

#include "absl/strings/string_view.h"

namespace rapt {

// Appends the text as a JSON string, with its quotes. Bytes that are not UTF-8 become U+FFFD.
void AppendJsonString(absl::string_view text, std::string& out);

}  // namespace rapt

#endif  // RAPT_BASE_JSON_STRING_H_
