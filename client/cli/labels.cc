#include "client/cli/labels.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "client/cli/tensor_file.h"

namespace rapt {
namespace {

// Returns the size of the well-formed UTF-8 sequence at the start of `text` (Unicode, table 3-7),
// or 0.
size_t SequenceBytes(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  const size_t bytes = first < 0x80                    ? 1
                       : first >= 0xc2 && first < 0xe0 ? 2
                       : first >= 0xe0 && first < 0xf0 ? 3
                       : first >= 0xf0 && first < 0xf5 ? 4
                                                       : 0;
  if (bytes == 0 || bytes > text.size()) return 0;
  for (size_t i = 1; i < bytes; ++i) {
    if ((byte(i) & 0xc0) != 0x80) return 0;
  }
  const bool overlong = (first == 0xe0 && byte(1) < 0xa0) || (first == 0xf0 && byte(1) < 0x90);
  const bool surrogate = first == 0xed && byte(1) >= 0xa0;
  const bool beyond_unicode = first == 0xf4 && byte(1) >= 0x90;
  return overlong || surrogate || beyond_unicode ? 0 : bytes;
}

bool IsPrintable(std::string_view text) {
  while (!text.empty()) {
    const unsigned char first = text[0];
    const size_t bytes = SequenceBytes(text);
    if (bytes == 0 || first < 0x20 || first == 0x7f) return false;
    text.remove_prefix(bytes);
  }
  return true;
}

}  // namespace

absl::StatusOr<std::vector<std::string>> ParseLabels(std::string_view flag, const std::string& text,
                                                     int64_t count) {
  std::vector<std::string> labels;
  if (text.empty()) {
    for (int64_t i = 0; i < count; ++i) labels.push_back(absl::StrCat(i));
    return labels;
  }
  if (text[0] == '@') {
    absl::StatusOr<std::string> lines = ReadFile(text.substr(1));
    if (!lines.ok()) return lines.status();
    if (!lines->empty() && lines->back() == '\n') lines->pop_back();
    labels = absl::StrSplit(*lines, '\n');
  } else {
    labels = absl::StrSplit(text, ',');
  }
  if (static_cast<int64_t>(labels.size()) != count) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has %d labels; the weights need %d", flag, labels.size(), count));
  }
  for (size_t i = 0; i < labels.size(); ++i) {
    if (!IsPrintable(labels[i])) {
      return absl::InvalidArgumentError(
          absl::StrFormat("label %d of %s is not printable UTF-8", i, flag));
    }
  }
  return labels;
}

absl::StatusOr<int64_t> FindLabel(std::string_view flag, const std::vector<std::string>& labels,
                                  const std::string& name) {
  const auto found = std::find(labels.begin(), labels.end(), name);
  if (found != labels.end()) return found - labels.begin();
  int64_t index = 0;
  if (absl::SimpleAtoi(name, &index) && index >= 0 && index < static_cast<int64_t>(labels.size())) {
    return index;
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is '%s'; it takes a label or a number from 0 to %d", flag, name,
                      static_cast<int64_t>(labels.size()) - 1));
}

}  // namespace rapt
