// Labels of queries and keys from the command line.
#ifndef RAPT_CLIENT_CLI_LABELS_H_
#define RAPT_CLIENT_CLI_LABELS_H_

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

namespace rapt {

// Parses "the,cat,sat", or "@words.txt" for a file with one label per line, which may contain
// commas. Returns the numbers from 0 if `text` is empty. InvalidArgument, naming `flag`, unless
// there are `count` labels of printable UTF-8.
absl::StatusOr<std::vector<std::string>> ParseLabels(std::string_view flag, const std::string& text,
                                                     int64_t count);

// Returns the position of `name` in `labels`. `name` may also be a position. An error names `flag`.
absl::StatusOr<int64_t> FindLabel(std::string_view flag, const std::vector<std::string>& labels,
                                  const std::string& name);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LABELS_H_
