// `rapt attend --lsh`: attention by locality-sensitive hashing.
#ifndef RAPT_CLIENT_CLI_LSH_ATTEND_H_
#define RAPT_CLIENT_CLI_LSH_ATTEND_H_

#include <string_view>
#include <vector>

#include "client/cli/commands.h"

namespace rapt {

// Returns its flags, without the dashes.
std::vector<std::string_view> LshFlagNames();

// REQUIRES: the arguments contain --lsh, or only --help.
ExitCode RunLshAttend(CommandArguments arguments);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LSH_ATTEND_H_
