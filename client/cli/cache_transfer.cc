// rapt cache export and rapt cache import.
#include "rapt/cache_transfer.h"

#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "client/cli/cache_flags.h"
#include "client/cli/cache_report.h"
#include "client/console/json.h"

namespace rapt {
namespace {

using client::CacheInfo;

// The name and the lease of the new cache.
struct ImportFlags {
  std::string name;
  std::optional<double> lease;

  std::vector<Flag> Table() {
    return {{"name", "NAME", "name of the new cache (default: as it was)", &name},
            {"lease", "SECONDS", "how long it lives unused (default: as it was)", &lease}};
  }

  absl::StatusOr<client::ImportOptions> Options() const {
    client::ImportOptions options{.name = name};
    if (!lease) return options;
    RAPT_ASSIGN_OR_RETURN(options.lease, LeaseOf(*lease));
    return options;
  }
};

ExitCode ExportToFile(client::CacheReader& from, const CacheInfo& cache, const std::string& path,
                      bool as_json) {
  const absl::Status status = client::WriteCacheFile(from, path);
  if (absl::IsInvalidArgument(status)) return FailUsage(status);
  if (!status.ok()) return FailCall(status);
  if (as_json) {
    JsonWriter json;
    json.BeginObject().Key("path").String(path).Key("cache");
    Write(cache, json);
    std::puts(json.EndObject().Take().c_str());
  } else {
    absl::FPrintF(stderr, "wrote %s\n", path);
  }
  return ExitCode::kOk;
}

}  // namespace

ExitCode RunCacheExport(CommandArguments arguments) {
  CacheFlags flags;
  ExpectedFlags expected;
  ImportFlags import;
  std::string path, to;
  int64_t chunk_tokens = 0;
  CommandLine line{
      .usage = "rapt cache export ID {-o FILE | --to HOST:PORT} [flags]",
      .summary =
          "Copies a cache to a file, or to another server, and prints the id that it has there. "
          "The cache stays where it was. --timeout covers the whole copy.",
      .flags = Joined({{{"output", "FILE", "the file", &path, 'o'},
                        {"to", "HOST:PORT",
                         "the server, with the flags of --address for TLS and the token", &to},
                        {"chunk-tokens", "N",
                         "tokens of a message, at most (default: as make 1 MiB)", &chunk_tokens},
                        expected.GenerationFlag()},
                       import.Table()}),
      .examples = {"rapt cache export $ID -o chat.kvcache",
                   "rapt cache export $ID --to 127.0.0.1:8001 --name copy --json"},
      .max_operands = 1};
  if (const auto done = flags.Parse(line, arguments, 1)) return *done;
  if (path.empty() == to.empty()) {
    return Fail(ExitCode::kUsage, "one of --output and --to must be given, and not both");
  }
  RAPT_ASSIGN_OR_EXIT(const client::ImportOptions options, FailUsage, import.Options());
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags.server));
  RAPT_ASSIGN_OR_EXIT(const CacheInfo info, FailCall,
                      FindCache(*server, flags.operands[0], expected));
  const std::unique_ptr<client::CacheReader> from = client::ExportCache(
      *server, {.id = info.id, .generation = info.generation, .chunk_tokens = chunk_tokens});
  if (to.empty()) return ExportToFile(*from, info, path, flags.json);
  ServerFlags target_flags = flags.server;
  target_flags.address = to;
  RAPT_ASSIGN_OR_EXIT(const auto target, FailConnect, Connect(target_flags));
  return PrintMade(client::ImportCache(*target, *from, options), flags.json);
}

ExitCode RunCacheImport(CommandArguments arguments) {
  CacheFlags flags;
  ImportFlags import;
  const CommandLine line{
      .usage = "rapt cache import FILE [flags]",
      .summary =
          "Makes a cache of a file that `rapt cache export` wrote, and prints its id. "
          "--timeout covers the whole copy.",
      .flags = import.Table(),
      .examples = {"rapt cache import chat.kvcache",
                   "rapt cache import chat.kvcache --name again --lease 60 --json"},
      .max_operands = 1};
  if (const auto done = flags.Parse(line, arguments, 1)) return *done;
  RAPT_ASSIGN_OR_EXIT(const client::ImportOptions options, FailUsage, import.Options());
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags.server));
  const std::string& path = flags.operands[0];
  absl::StatusOr<client::Cache> made =
      client::ImportCache(*server, *client::ReadCacheFile(path), options);
  const bool is_file_wrong = absl::IsInvalidArgument(made.status()) &&
                             absl::StartsWith(made.status().message(), path + ": ");
  if (is_file_wrong) return FailUsage(made.status());
  return PrintMade(std::move(made), flags.json);
}

}  // namespace rapt
