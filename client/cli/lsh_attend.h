// `rapt attend --lsh`: attention by locality-sensitive hashing.
#ifndef RAPT_CLIENT_CLI_LSH_ATTEND_H_
#define RAPT_CLIENT_CLI_LSH_ATTEND_H_

#include "client/cli/commands.h"

namespace rapt {

// REQUIRES: the arguments contain --lsh.
ExitCode RunLshAttend(CommandArguments arguments);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LSH_ATTEND_H_
