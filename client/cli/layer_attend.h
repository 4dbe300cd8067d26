// `rapt attend --model`: attention with the projections of a layer.
#ifndef RAPT_CLIENT_CLI_LAYER_ATTEND_H_
#define RAPT_CLIENT_CLI_LAYER_ATTEND_H_

#include <string_view>
#include <vector>

#include "client/cli/commands.h"

namespace rapt {

// Returns its flags, without the dashes.
std::vector<std::string_view> LayerFlagNames();

// REQUIRES: the arguments contain --model, or only --help.
ExitCode RunLayerAttend(CommandArguments arguments);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_LAYER_ATTEND_H_
