#include "client/cli/command_table.h"

#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/arguments.h"

namespace rapt {

void PrintCommands(std::string_view program, std::string_view summary,
                   absl::Span<const Command> commands) {
  absl::PrintF("usage: %s COMMAND [flags]\n\n%s\n\n", program, summary);
  for (const Command& command : commands) {
    absl::PrintF("  %-14s %s\n", command.name, command.summary);
  }
  absl::PrintF("\n`%s COMMAND --help` shows the flags of a command, with examples.\n", program);
}

ExitCode RunNamed(std::string_view program, absl::Span<const Command> commands,
                  CommandArguments arguments) {
  if (arguments.empty()) {
    return Fail(ExitCode::kUsage,
                absl::StrFormat("no command given; %s --help lists the commands", program));
  }
  const std::string& name = arguments.front();
  std::vector<std::string_view> names;
  for (const Command& command : commands) {
    if (command.name == name) return command.run(arguments.subspan(1));
    names.push_back(command.name);
  }
  const std::string_view nearest = Nearest(name, names);
  if (nearest.empty()) {
    return Fail(
        ExitCode::kUsage,
        absl::StrFormat("unknown command '%s'; %s --help lists the commands", name, program));
  }
  return Fail(ExitCode::kUsage,
              absl::StrFormat("unknown command '%s'; did you mean %s?", name, nearest));
}

}  // namespace rapt
