#include "client/cli/labels.h"

#include <algorithm>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_split.h"
#include "base/status_macros.h"
#include "client/cli/tensor_file.h"
#include "client/console/text.h"

namespace rapt {
absl::StatusOr<std::vector<std::string>> ParseLabels(std::string_view flag, const std::string& text,
                                                     int64_t count) {
  std::vector<std::string> labels;
  if (text.empty()) {
    for (int64_t i = 0; i < count; ++i) labels.push_back(absl::StrCat(i));
    return labels;
  }
  if (text[0] == '@') {
    RAPT_ASSIGN_OR_RETURN(std::string lines, ReadFile(text.substr(1)));
    if (!lines.empty() && lines.back() == '\n') lines.pop_back();
    labels = absl::StrSplit(lines, '\n');
    for (std::string& label : labels) {  // lines may end as on Windows
      if (absl::EndsWith(label, "\r")) label.pop_back();
    }
  } else {
    labels = absl::StrSplit(text, ',');
  }
  if (static_cast<int64_t>(labels.size()) != count) {
    return absl::InvalidArgumentError(
        absl::StrFormat("%s has %d labels; the weights need %d", flag, labels.size(), count));
  }
  for (size_t i = 0; i < labels.size(); ++i) {
    if (Printable(labels[i]) != labels[i]) {
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
