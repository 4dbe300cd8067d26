// What the commands of `rapt cache` share: their flags, and the cache that an operand names.
#ifndef RAPT_CLIENT_CLI_CACHE_FLAGS_H_
#define RAPT_CLIENT_CLI_CACHE_FLAGS_H_

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/cli/commands.h"
#include "client/console/command_line.h"
#include "client/console/server_connection.h"
#include "rapt/cache.h"

namespace rapt {

struct CacheFlags {
  ServerFlags server;
  bool json = false;
  std::vector<std::string> operands;

  // Adds the rows for the server and --json, parses, and checks that there are `least` operands.
  // Returns an exit code if the command ends here.
  std::optional<ExitCode> Parse(CommandLine line, CommandArguments arguments, size_t least);
};

// Which tokens a call expects, where that is not what the server says.
struct ExpectedFlags {
  std::optional<uint64_t> generation;
  std::optional<int64_t> at;
  int64_t layer = 0;

  Flag GenerationFlag();
  std::vector<Flag> Table();  // --layer, --at and --generation
};

// Returns what the server says of the cache, and in its place what the flags expect. Errors are the
// server's; InvalidArgument for a layer that the cache does not have.
absl::StatusOr<client::CacheInfo> FindCache(client::Client& server, const std::string& id,
                                            const ExpectedFlags& expected);

// "--lease" as milliseconds. InvalidArgument unless it is 0 to 2^31 s.
absl::StatusOr<std::chrono::milliseconds> LeaseOf(double seconds);

// `rapt cache append`, `rapt cache attend`, `rapt cache diagnose`, `rapt cache export` and `rapt
// cache import`.
ExitCode RunCacheAppend(CommandArguments arguments);
ExitCode RunCacheAttend(CommandArguments arguments);
ExitCode RunCacheDiagnose(CommandArguments arguments);
ExitCode RunCacheExport(CommandArguments arguments);
ExitCode RunCacheImport(CommandArguments arguments);

}  // namespace rapt

#endif  // RAPT_CLIENT_CLI_CACHE_FLAGS_H_
