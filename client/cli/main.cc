// rapt: the command line client.
#include <cstdio>
#include <cstdlib>
#include <new>
#include <string>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/version.h"
#include "client/cli/command_table.h"
#include "client/cli/commands.h"

namespace rapt {
namespace {

constexpr Command kCommands[] = {
    {"demo", "show attention in \"the cat sat on the mat\"", RunDemoCommand},
    {"attend", "compute attention over arrays in .npy and .npz files", RunAttendCommand},
    {"run", "compute another operator: linear attention, hashing, rotary embedding, positions",
     RunRunCommand},
    {"compare", "show what a mask, a sink or another flag changes", RunCompareCommand},
    {"plot", "draw attention weights as heat maps, bars or curves: .svg, .html or .png",
     RunPlotCommand},
    {"pattern", "write a sparsity pattern as a mask: longformer, strided, bigbird, neighbourhood",
     RunPatternCommand},
    {"diagnose", "explain a call whose result looks wrong", RunDiagnoseCommand},
    {"gradcheck", "check gradients against differences of the forward pass", RunGradcheckCommand},
    {"layer", "check a layer in a folder of a model repository", RunLayerCommand},
    {"memory", "estimate the memory attention needs at several lengths", RunMemoryCommand},
    {"compare-memory", "measure attention with the full score matrix against chunks",
     RunCompareMemoryCommand},
    {"cache", "keep keys and values with a server: create, append, attend, fork, export",
     RunCacheCommand},
    {"info", "show a server's version, backends and limits", RunInfoCommand},
    {"health", "check whether a server is ready", RunHealthCommand},
};

void PrintHelp() {
  PrintCommands("rapt", "Command line client of rapt-server.", kCommands);
  std::printf(
      "\nexit codes: 0 success, 1 the call failed, 2 invalid flags or files, 3 no server "
      "reachable\n");
}

ExitCode Main(CommandArguments arguments) {
  const std::string name = arguments.empty() ? "" : arguments.front();
  if (name == "--help" || name == "-h" || name == "help") {
    PrintHelp();
    return ExitCode::kOk;
  }
  if (name == "--version") {
    absl::PrintF("rapt %s\n", Version());
    return ExitCode::kOk;
  }
  try {
    return RunNamed("rapt", kCommands, arguments);
  } catch (const std::bad_alloc&) {
    return Fail(ExitCode::kCallFailed, "out of memory");
  }
}

}  // namespace
}  // namespace rapt

int main(int argc, char** argv) {
  // Errors are told once, by the program. gRPC reads it when it starts.
  setenv("GRPC_VERBOSITY", "NONE", /*overwrite=*/0);
  const std::vector<std::string> arguments(argv + 1, argv + argc);
  rapt::ExitCode code = rapt::Main(arguments);
  // Output may have failed, e.g. because the disk is full.
  if (std::fflush(stdout) != 0 && code == rapt::ExitCode::kOk) {
    code = rapt::Fail(rapt::ExitCode::kUsage, "can't write to standard output");
  }
  return static_cast<int>(code);
}
