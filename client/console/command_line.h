// The flags of one command as a table. CLI11 parses them and formats --help.
//
//     std::string output;
//     const CommandLine line{
//         .usage = "rapt plot WEIGHTS.npy -o PICTURE",
//         .summary = "Draws attention weights.",
//         .flags = {{"output", "FILE", "output file", &output, 'o', true}, ...},
//         .examples = {"rapt plot w.npy -o w.svg"},
//         .max_operands = 1};
//     const absl::StatusOr<ParsedArguments> parsed = line.Parse(arguments);
#ifndef RAPT_CLIENT_CONSOLE_COMMAND_LINE_H_
#define RAPT_CLIENT_CONSOLE_COMMAND_LINE_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/arguments.h"

namespace rapt {

// One of `names`; `set` receives its index.
struct NamedChoice {
  absl::Span<const absl::string_view> names;
  std::function<void(size_t index)> set;
};

// Reads a value of the flag `name`, "--scale", which is "true" for one without a placeholder.
using FlagReader = std::function<absl::Status(std::string_view name, const std::string& text)>;

// Points to the variable that receives the value and holds the default. A list is written 1,2,3.
using FlagTarget =
    std::variant<bool*, int64_t*, uint64_t*, double*, std::string*, std::optional<int64_t>*,
                 std::optional<uint64_t>*, std::optional<double>*, std::optional<std::string>*,
                 std::vector<int64_t>*, NamedChoice, FlagReader>;

struct Flag {
  std::string_view name;         // without the dashes
  std::string_view placeholder;  // the value's name in --help; empty for a switch
  std::string_view help;
  FlagTarget target;
  char letter = '\0';  // short form: 'o' for -o, '\0' for none
  bool required = false;
  // The first operands that take the flag, "strided|bigbird", or the switch, "--scaling". Empty: it
  // is always taken.
  std::string_view of = {};
};

// Returns `flag` with its `of`, which --help shows before the help.
inline Flag Of(std::string_view of, Flag flag) {
  flag.of = of;
  return flag;
}

// Returns the rows of all tables.
std::vector<Flag> Joined(std::initializer_list<std::vector<Flag>> tables);

std::vector<std::string_view> NamesOf(const std::vector<Flag>& flags);

struct CommandLine {
  std::string_view usage;  // "rapt plot WEIGHTS.npy... -o PICTURE [flags]"
  std::string_view summary;
  std::vector<Flag> flags;
  std::vector<std::string_view> examples;  // one command each
  int max_operands = 0;                    // arguments that are not flags

  // Accepts the syntax of ParseArguments(); arguments after "--" are operands. If a flag is
  // repeated, its last value wins. InvalidArgument names the flag, its value and the values
  // allowed, or says what a flag is of.
  absl::StatusOr<ParsedArguments> Parse(absl::Span<const std::string> arguments) const;
};

// "--seq is 0; it must be at least 1"
absl::Status CheckAtLeastOne(std::string_view flag, int64_t value);

}  // namespace rapt

#endif  // RAPT_CLIENT_CONSOLE_COMMAND_LINE_H_
