// Names for queries and keys, as a person gives them on the command line.
#ifndef RAPT_CLIENT_CLI_LABELS_H_
#define RAPT_CLIENT_CLI_LABELS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace rapt {

// "the,cat,sat", or "@words.txt" for a file with one label a line (labels with commas in them).
// Empty means the numbers from 0. InvalidArgument where there are not `count` labels of printable
// UTF-8; `flag` names who asked.
absl::StatusOr<std::vector<std::string>> ParseLabels(std::string_view flag, const std::string& text,
                                                     int64_t count);

// The position of `name` among `labels`, or of the number that it is.
absl::StatusOr<int64_t> FindLabel(const std::vector<std::string>& labels, const std::string& name);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LABELS_H_
