// The commands of `rapt`. Each parses its arguments, does its work, prints, and says how it went;
// to add one: a file beside this one, a line here and one in main.cc.
#ifndef RAPT_CLIENT_CLI_COMMANDS_H_
#define RAPT_CLIENT_CLI_COMMANDS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "client/cli/command_line.h"
#include "client/cli/exit_code.h"

namespace rapt {

using CommandArguments = absl::Span<const std::string>;

ExitCode RunAttendCommand(CommandArguments arguments);
ExitCode RunDemoCommand(CommandArguments arguments);
ExitCode RunDiagnoseCommand(CommandArguments arguments);
ExitCode RunHealthCommand(CommandArguments arguments);
ExitCode RunInfoCommand(CommandArguments arguments);
ExitCode RunMemoryCommand(CommandArguments arguments);
ExitCode RunPlotCommand(CommandArguments arguments);

// Parses into the flags' targets and `operands`. A value where the command ends here: it was asked
// for help, which is printed, or can't be understood.
std::optional<ExitCode> ParseOrExit(const CommandLine& line, CommandArguments arguments,
                                    std::vector<std::string>* operands);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_COMMANDS_H_
