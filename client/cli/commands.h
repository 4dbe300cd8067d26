// The commands of `rapt`. Each parses its arguments, does its work, prints, and says how it went;
// to add one: a file beside this one, a line here and one in main.cc.
#ifndef RAPT_CLIENT_CLI_COMMANDS_H_
#define RAPT_CLIENT_CLI_COMMANDS_H_

#include <string>

#include "absl/types/span.h"
#include "client/console/exit_code.h"

namespace rapt {

using CommandArguments = absl::Span<const std::string>;

ExitCode RunAttendCommand(CommandArguments arguments);
ExitCode RunCompareMemoryCommand(CommandArguments arguments);
ExitCode RunDemoCommand(CommandArguments arguments);
ExitCode RunDiagnoseCommand(CommandArguments arguments);
ExitCode RunHealthCommand(CommandArguments arguments);
ExitCode RunInfoCommand(CommandArguments arguments);
ExitCode RunMemoryCommand(CommandArguments arguments);
ExitCode RunPlotCommand(CommandArguments arguments);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_COMMANDS_H_
