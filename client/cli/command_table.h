// Commands by name, in main.cc and in commands that have commands of their own.
#ifndef RAPT_CLIENT_CLI_COMMAND_TABLE_H_
#define RAPT_CLIENT_CLI_COMMAND_TABLE_H_

#include <string_view>

#include "absl/types/span.h"
#include "client/cli/commands.h"

namespace rapt {

struct Command {
  std::string_view name;
  std::string_view summary;
  ExitCode (*run)(CommandArguments arguments);
};

// Prints "usage: `program` COMMAND [flags]", the summary, the commands and how to get their help.
void PrintCommands(std::string_view program, std::string_view summary,
                   absl::Span<const Command> commands);

// Runs the command that the first argument names with the other ones. Fails if there is none.
ExitCode RunNamed(std::string_view program, absl::Span<const Command> commands,
                  CommandArguments arguments);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_COMMAND_TABLE_H_
