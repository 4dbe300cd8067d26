// rapt: attention on the command line.
#include <cstdio>
#include <new>
#include <string>
#include <string_view>
#include <vector>

#include "absl/strings/str_format.h"
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
    {"demo", "\"the cat sat on the mat\": who attends to whom", RunDemoCommand},
    {"attend", "attention over arrays in .npy and .npz files", RunAttendCommand},
    {"plot", "heat maps of attention weights as .svg, .html or .png", RunPlotCommand},
    {"diagnose", "what happens inside a call whose result looks wrong", RunDiagnoseCommand},
    {"memory", "how many bytes attention needs at which length", RunMemoryCommand},
    {"compare-memory", "attention with all scores against attention in chunks, measured",
     RunCompareMemoryCommand},
    {"info", "what a server is and offers", RunInfoCommand},
    {"health", "whether a server is ready", RunHealthCommand},
};

void PrintHelp() {
  std::printf("usage: rapt COMMAND [flags]\n\nAttention as a service, on the command line.\n\n");
  for (const Command& command : kCommands) {
    absl::PrintF("  %-14s %s\n", command.name, command.summary);
  }
  std::printf(
      "\n`rapt COMMAND --help` explains its flags, with examples.\n\n"
      "exit codes: 0 done, 1 the call failed, 2 wrong flags or files, 3 no server to reach\n");
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
                absl::StrFormat("unknown command '%s'; rapt --help lists what there is", name));
  }
  return Fail(ExitCode::kUsage,
              absl::StrFormat("unknown command '%s'; did you mean %s?", name, nearest));
}

ExitCode Main(CommandArguments arguments) {
  if (arguments.empty()) {
    return Fail(ExitCode::kUsage, "which command? rapt --help lists what there is");
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
    return Fail(ExitCode::kCallFailed, "this machine has too little memory for that");
  }
}

}  // namespace
}  // namespace rapt

int main(int argc, char** argv) {
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  rapt::ExitCode code = rapt::Main(arguments);
  // What was printed may not have arrived: a full disk, say.
  if (std::fflush(stdout) != 0 && code == rapt::ExitCode::kOk) {
    code = rapt::Fail(rapt::ExitCode::kUsage, "can't write to standard output");
  }
  return static_cast<int>(code);
}
