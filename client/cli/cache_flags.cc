#include "client/cli/cache_flags.h"

#include <utility>

#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace rapt {

std::optional<ExitCode> CacheFlags::Parse(CommandLine line, CommandArguments arguments,
                                          size_t least) {
  line.flags =
      Joined({line.flags, server.Table(), {{"json", "", "print a report as JSON", &json}}});
  if (const std::optional<ExitCode> done = ParseOrExit(line, arguments, &operands)) return done;
  if (operands.size() >= least) return std::nullopt;
  return Fail(ExitCode::kUsage, absl::StrFormat("%d of %d arguments given; usage: %s",
                                                operands.size(), least, line.usage));
}

Flag ExpectedFlags::GenerationFlag() {
  return {"generation", "N", "fail unless the cache has this generation (default: do not check)",
          &generation};
}

std::vector<Flag> ExpectedFlags::Table() {
  return {{"layer", "N", "layer, from 0 (default: 0)", &layer},
          {"at", "N",
           "tokens that the layer has before this call; the same call again then changes nothing "
           "(default: those it has)",
           &at},
          GenerationFlag()};
}

absl::StatusOr<client::CacheInfo> FindCache(client::Client& server, const std::string& id,
                                            const ExpectedFlags& expected) {
  RAPT_ASSIGN_OR_RETURN(client::FoundCaches found, client::GetCaches(server, {id}));
  client::CacheInfo info = std::move(found.caches.at(0));
  if (expected.generation) info.generation = *expected.generation;
  const auto layers = static_cast<int64_t>(info.lengths.size());
  if (expected.layer < 0 || expected.layer >= layers) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--layer is %d; the cache has layers 0 to %d", expected.layer, layers - 1));
  }
  if (expected.at) info.lengths[static_cast<size_t>(expected.layer)] = *expected.at;
  return info;
}

absl::StatusOr<std::chrono::milliseconds> LeaseOf(double seconds) {
  constexpr double kMost = 2147483648;
  if (seconds >= 0 && seconds <= kMost) {
    return std::chrono::milliseconds(static_cast<int64_t>(seconds * 1000));
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("--lease is %g; it takes seconds, from 0 to %.0f", seconds, kMost));
}

}  // namespace rapt
