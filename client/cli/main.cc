// rapt: the command line client.
#include <cstdio>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/arguments.h"
#include "base/version.h"
#include "client/cli/commands.h"

namespace rapt {
namespace {

struct Command {
  std::string_view name;
  std::string_view summary;
  ExitCode (*run)(CommandArguments arguments);
};

constexpr Command kCommands[] = {
    {"demo", "show attention in \"the cat sat on the mat\"", RunDemoCommand},
    {"attend", "compute attention over arrays in .npy and .npz files", RunAttendCommand},
    {"compare", "show what a mask, a sink or another flag changes", RunCompareCommand},
    {"plot", "draw attention weights as heat maps, bars or curves: .svg, .html or .png",
     RunPlotCommand},
    {"pattern", "write a sparsity pattern as a mask: longformer, strided, bigbird, neighbourhood",
     RunPatternCommand},
    {"diagnose", "explain a call whose result looks wrong", RunDiagnoseCommand},
    {"gradcheck", "check gradients against differences of the forward pass", RunGradcheckCommand},
    {"rotary", "rotate a tensor by its positions, as models do with Q and K", RunRotaryCommand},
    {"positions", "add a positional encoding to a tensor", RunPositionsCommand},
    {"memory", "estimate the memory attention needs at several lengths", RunMemoryCommand},
    {"compare-memory", "measure attention with the full score matrix against chunks",
     RunCompareMemoryCommand},
    {"info", "show a server's version, backends and limits", RunInfoCommand},
    {"health", "check whether a server is ready", RunHealthCommand},
};

void PrintHelp() {
  std::printf("usage: rapt COMMAND [flags]\n\nCommand line client of rapt-server.\n\n");
  for (const Command& command : kCommands) {
    absl::PrintF("  %-14s %s\n", command.name, command.summary);
  }
  std::printf(
      "\n`rapt COMMAND --help` shows the flags of a command, with examples.\n\n"
      "exit codes: 0 success, 1 the call failed, 2 invalid flags or files, 3 no server "
      "reachable\n");
}

ExitCode RunNamed(std::string_view name, CommandArguments arguments) {
  std::vector<std::string_view> names;
  for (const Command& command : kCommands) {
    if (command.name == name) return command.run(arguments);
    names.push_back(command.name);
  }
  const std::string_view nearest = Nearest(name, names);
  if (nearest.empty()) {
    return Fail(ExitCode::kUsage,
                absl::StrFormat("unknown command '%s'; rapt --help lists the commands", name));
  }
  return Fail(ExitCode::kUsage,
              absl::StrFormat("unknown command '%s'; did you mean %s?", name, nearest));
}

ExitCode Main(CommandArguments arguments) {
  if (arguments.empty()) {
    return Fail(ExitCode::kUsage, "no command given; rapt --help lists the commands");
  }
  const std::string& name = arguments.front();
  if (name == "--help" || name == "-h" || name == "help") {
    PrintHelp();
    return ExitCode::kOk;
  }
  if (name == "--version") {
    absl::PrintF("rapt %s\n", Version());
    return ExitCode::kOk;
  }
  try {
    return RunNamed(name, arguments.subspan(1));
  } catch (const std::bad_alloc&) {
    return Fail(ExitCode::kCallFailed, "out of memory");
  }
}

}  // namespace
}  // namespace rapt

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  rapt::ExitCode code = rapt::Main(arguments);
  // Output may have failed, e.g. because the disk is full.
  if (std::fflush(stdout) != 0 && code == rapt::ExitCode::kOk) {
    code = rapt::Fail(rapt::ExitCode::kUsage, "can't write to standard output");
  }
  return static_cast<int>(code);
}
