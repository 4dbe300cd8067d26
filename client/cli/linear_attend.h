// `rapt attend --linear`: linear attention.
#ifndef RAPT_CLIENT_CLI_LINEAR_ATTEND_H_
#define RAPT_CLIENT_CLI_LINEAR_ATTEND_H_

#include <string_view>
#include <vector>

#include "client/cli/commands.h"

namespace rapt {

// Returns its flags, without the dashes.
std::vector<std::string_view> LinearFlagNames();

// REQUIRES: the arguments contain --linear, or only --help.
ExitCode RunLinearAttend(CommandArguments arguments);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LINEAR_ATTEND_H_
