// One command's flags as a table: what parses them also explains them in --help.
//
//     std::string output;
//     std::vector<int64_t> window;
//     const CommandLine line{
//         .usage = "rapt plot WEIGHTS.npy -o PICTURE",
//         .summary = "Draws attention weights.",
//         .flags = {{"output", "FILE", "where the picture goes", &output, 'o'}, ...},
//         .examples = {"rapt plot w.npy -o w.svg"}};
//     absl::Status status = line.Parse(arguments, &files);
#ifndef RAPT_CLIENT_CONSOLE_COMMAND_LINE_H_
#define RAPT_CLIENT_CONSOLE_COMMAND_LINE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace rapt {

// Where a flag's value goes; what it points to holds the default. A list is written 1,2,3.
using FlagTarget =
    std::variant<bool*, int64_t*, uint64_t*, double*, std::string*, std::optional<int64_t>*,
                 std::optional<double>*, std::optional<std::string>*, std::vector<int64_t>*>;

struct Flag {
  std::string_view name;         // without the dashes
  std::string_view placeholder;  // how --help calls the value; empty for a bool
  std::string_view help;
  FlagTarget target;
  char letter = '\0';  // -o for --output, or none
  bool required = false;
};

struct CommandLine {
  std::string_view usage;  // "rapt plot WEIGHTS.npy... -o PICTURE [flags]"
  std::string_view summary;
  std::vector<Flag> flags;
  std::vector<std::string_view> examples;  // whole commands, one a line
  int max_operands = 0;                    // arguments that are no flags

  // Accepts --name=value, --name value, -l value, --switch and --switch=false; after "--" only
  // operands. The last of several stands. InvalidArgument names the flag and what was wrong with
  // it.
  absl::Status Parse(absl::Span<const std::string> arguments,
                     std::vector<std::string>* operands) const;

  std::string Help() const;

 private:
  const Flag* Find(std::string_view name) const;
  absl::Status UnknownFlag(std::string_view argument, std::string_view name) const;
};

// "--seq is 0; it must be at least 1"
absl::Status CheckAtLeastOne(std::string_view flag, int64_t value);

bool AsksForHelp(absl::Span<const std::string> arguments);

// The one of `known` that a person who wrote `word` most likely meant; empty where none is near.
std::string_view Nearest(std::string_view word, absl::Span<const std::string_view> known);

}  // namespace rapt

#endif  // RAPT_CLIENT_CONSOLE_COMMAND_LINE_H_
