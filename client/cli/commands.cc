#include "client/cli/commands.h"

#include <cstdio>

namespace rapt {

std::optional<ExitCode> ParseOrExit(const CommandLine& line, CommandArguments arguments,
                                    std::vector<std::string>* operands) {
  if (AsksForHelp(arguments)) {
    std::fputs(line.Help().c_str(), stdout);
    return ExitCode::kOk;
  }
  if (const absl::Status parsed = line.Parse(arguments, operands); !parsed.ok()) {
    return FailUsage(parsed);
  }
  return std::nullopt;
}

}  // namespace rapt
