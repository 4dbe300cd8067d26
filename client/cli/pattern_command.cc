#include <cstdio>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_format.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "client/cli/commands.h"
#include "client/cli/tensor_file.h"
#include "client/console/command_line.h"
#include "rapt/patterns.h"

namespace rapt {
namespace {

struct PatternFlags {
  std::string output;
  std::optional<int64_t> length;
  std::optional<int64_t> window;
  std::vector<int64_t> global;
  std::optional<int64_t> stride;
  std::vector<int64_t> shape;
  std::optional<int64_t> kernel;
  int64_t dilation = 1;
  client::BigBird bigbird;
};

absl::StatusOr<int64_t> Needed(std::string_view pattern, std::string_view flag,
                               const std::optional<int64_t>& value) {
  if (value) return *value;
  return absl::InvalidArgumentError(absl::StrFormat("%s needs --%s", pattern, flag));
}

absl::StatusOr<client::Tensor> MakePattern(const std::string& name, const PatternFlags& flags) {
  if (name == "neighbourhood") {
    if (flags.shape.empty()) {
      return Invalid("neighbourhood needs --shape");
    }
    RAPT_ASSIGN_OR_RETURN(const int64_t kernel, Needed(name, "kernel", flags.kernel));
    return client::NeighbourhoodMask(flags.shape, kernel, flags.dilation);
  }
  if (name != "longformer" && name != "strided" && name != "bigbird") {
    return absl::InvalidArgumentError(absl::StrFormat(
        "unknown pattern '%s'; it must be longformer, strided, bigbird or neighbourhood", name));
  }
  RAPT_ASSIGN_OR_RETURN(const int64_t length, Needed(name, "length", flags.length));
  if (name == "longformer") {
    RAPT_ASSIGN_OR_RETURN(const int64_t window, Needed(name, "window", flags.window));
    return client::LongformerMask(length, window, flags.global);
  }
  if (name == "strided") {
    RAPT_ASSIGN_OR_RETURN(const int64_t stride, Needed(name, "stride", flags.stride));
    return client::StridedMask(length, stride);
  }
  client::BigBird bigbird = flags.bigbird;
  bigbird.length = length;
  return client::BigBirdBlockMask(bigbird);
}

ExitCode WritePattern(const std::string& name, const PatternFlags& flags) {
  RAPT_ASSIGN_OR_EXIT(const client::Tensor pattern, FailUsage, MakePattern(name, flags));
  const absl::Span<const std::byte> bytes = pattern.bytes();
  ArrayWriter writer;
  writer.Add(flags.output, name, NpyTypeOf(DType::kBool), pattern.shape(), bytes);
  RAPT_EXIT_IF_ERROR(FailUsage, writer.Write());
  int64_t visible = 0;
  for (const std::byte flag : bytes) visible += flag != std::byte{0} ? 1 : 0;
  absl::PrintF("%s: %s, %.1f %% true\n", flags.output, client::ToString(pattern.shape()),
               100.0 * static_cast<double>(visible) / static_cast<double>(bytes.size()));
  return ExitCode::kOk;
}

}  // namespace

ExitCode RunPatternCommand(CommandArguments arguments) {
  PatternFlags flags;
  const CommandLine line{
      .usage = "rapt pattern longformer|strided|bigbird|neighbourhood -o MASK.npy [flags]",
      .summary =
          "Writes a sparsity pattern, true where a query may see a key: for `rapt attend --mask`, "
          "and of bigbird for --block-mask with --block-q and --block-k. `rapt plot` draws it.",
      .flags = {{"output", "FILE", ".npy or .npz file", &flags.output, 'o', true},
                Of("longformer|strided|bigbird",
                   {"length", "N", "queries and keys", &flags.length}),
                Of("longformer", {"window", "N", "keys on each side of the query", &flags.window}),
                Of("longformer",
                   {"global", "LIST", "positions that see and are seen by all", &flags.global}),
                Of("strided",
                   {"stride", "N", "the last N keys and every N-th key before", &flags.stride}),
                Of("bigbird", {"block", "N", "queries and keys of a block (default: 64)",
                               &flags.bigbird.block}),
                Of("bigbird", {"heads", "N", "heads, each with its own blocks (default: 1)",
                               &flags.bigbird.heads}),
                Of("bigbird", {"random", "N", "blocks drawn for each row (default: 3)",
                               &flags.bigbird.random}),
                Of("bigbird", {"seed", "N", "seed of the draws (default: 0)", &flags.bigbird.seed}),
                Of("neighbourhood",
                   {"shape", "LIST", "the grid of positions, 1 to 3 axes", &flags.shape}),
                Of("neighbourhood", {"kernel", "N", "keys along each axis", &flags.kernel}),
                Of("neighbourhood",
                   {"dilation", "N", "distance of these keys (default: 1)", &flags.dilation})},
      .examples = {"rapt pattern longformer --length 512 --window 32 --global 0 -o mask.npy",
                   "rapt pattern strided --length 512 --stride 16 -o mask.npy",
                   "rapt pattern bigbird --length 4096 --block 64 --heads 8 -o blocks.npy",
                   "rapt pattern neighbourhood --shape 14,14 --kernel 3 -o mask.npy"},
      .max_operands = 1};
  std::vector<std::string> operands;
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return *done;
  if (operands.empty()) {
    return Fail(ExitCode::kUsage,
                "no pattern given; it must be longformer, strided, bigbird or neighbourhood");
  }
  return WritePattern(operands.front(), flags);
}

}  // namespace rapt
