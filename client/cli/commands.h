// The commands of `rapt`. Each parses its arguments, prints its result and returns an exit code. A
// new command needs a file in this folder, a line here and a line in main.cc.
#ifndef RAPT_CLIENT_CLI_COMMANDS_H_
#define RAPT_CLIENT_CLI_COMMANDS_H_

#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"
#include "client/console/exit_code.h"

namespace rapt {

using CommandArguments = absl::Span<const std::string>;

ExitCode RunAttendCommand(CommandArguments arguments);
ExitCode RunCacheCommand(CommandArguments arguments);
ExitCode RunCompareCommand(CommandArguments arguments);
ExitCode RunCompareMemoryCommand(CommandArguments arguments);
ExitCode RunDemoCommand(CommandArguments arguments);
ExitCode RunDiagnoseCommand(CommandArguments arguments);
ExitCode RunGradcheckCommand(CommandArguments arguments);
ExitCode RunHealthCommand(CommandArguments arguments);
ExitCode RunInfoCommand(CommandArguments arguments);
ExitCode RunLayerCommand(CommandArguments arguments);
ExitCode RunMemoryCommand(CommandArguments arguments);
ExitCode RunPatternCommand(CommandArguments arguments);
ExitCode RunPlotCommand(CommandArguments arguments);
ExitCode RunRunCommand(CommandArguments arguments);

// `rapt attend --model`: attention with the projections of a layer. REQUIRES: the arguments contain
// --model, or only --help.
ExitCode RunLayerAttend(CommandArguments arguments);
// Returns its flags, without the dashes.
std::vector<std::string_view> LayerFlagNames();

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_COMMANDS_H_
