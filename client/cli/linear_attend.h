// `rapt attend --linear`: linear attention.
#ifndef RAPT_CLIENT_CLI_LINEAR_ATTEND_H_
#define RAPT_CLIENT_CLI_LINEAR_ATTEND_H_

#include "client/cli/commands.h"

namespace rapt {

// REQUIRES: the arguments contain --linear.
ExitCode RunLinearAttend(CommandArguments arguments);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LINEAR_ATTEND_H_
