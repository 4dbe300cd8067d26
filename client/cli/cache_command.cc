// rapt cache: keys and values that stay with a server.
#include <cstdio>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "client/cli/cache_flags.h"
#include "client/cli/cache_report.h"
#include "client/cli/command_table.h"
#include "client/cli/commands.h"
#include "client/console/json.h"

namespace rapt {
namespace {

using client::CacheInfo;

constexpr int64_t kMaxLayers = 1024;
constexpr int kMaxIds = 1024;

// The names of client::DType up to kFloat64.
constexpr absl::string_view kTypes[] = {"fp32", "fp16", "bf16", "fp64"};

// The names of client::CacheStorage.
constexpr absl::string_view kStorages[] = {"plain", "int8"};

ExitCode RunCreate(CommandArguments arguments) {
  CacheFlags flags;
  client::CacheOptions options;
  client::LayerShape shape;
  int64_t layers = 1;
  double lease = 0;
  const CommandLine line{
      .usage = "rapt cache create --kv-heads N --head-size N [flags]",
      .summary =
          "Makes a cache and prints its id. It lives until `rapt cache close`, or until its "
          "lease runs out: append and attend renew it.",
      .flags = {{"layers", "N", "layers of the model (default: 1)", &layers},
                {"kv-heads", "N", "key and value heads", &shape.kv_heads, '\0', true},
                {"head-size", "N", "head size of Q and K", &shape.head_size, '\0', true},
                {"value-head-size", "N", "head size of V (default: --head-size)",
                 &shape.value_head_size},
                {"dtype", "TYPE", "fp32, fp16, bf16 or fp64 (default: fp32)",
                 NamedChoice{kTypes,
                             [&options](size_t index) {
                               options.dtype = static_cast<client::DType>(index);
                             }}},
                {"storage", "TYPE", "plain or int8, 8 bits a number (default: plain)",
                 NamedChoice{kStorages,
                             [&options](size_t index) {
                               options.storage = static_cast<client::CacheStorage>(index);
                             }}},
                {"keep-last", "N", "a row sees the last N tokens only (default: all)",
                 &shape.keep_last},
                {"keep-first", "N", "positions below N, which every row sees as well (default: 0)",
                 &shape.keep_first},
                {"name", "NAME", "return the cache of this name if there is one", &options.name},
                {"reserve-tokens", "N", "take the pages of N tokens of every layer now",
                 &options.reserve_tokens},
                {"lease", "SECONDS", "how long it lives unused (default: the server's)", &lease},
                {"first-position", "N", "position of token 0 (default: 0)",
                 &options.first_position}},
      .examples = {"rapt cache create --layers 2 --kv-heads 2 --head-size 4",
                   "rapt cache create --layers 32 --kv-heads 8 --head-size 128 --dtype bf16 "
                   "--keep-last 4096 --keep-first 4 --lease 60 --name chat --json"}};
  if (const auto done = flags.Parse(line, arguments, 0)) return *done;
  if (layers < 1 || layers > kMaxLayers) {
    return Fail(ExitCode::kUsage,
                absl::StrFormat("--layers is %d; it must be from 1 to %d", layers, kMaxLayers));
  }
  RAPT_ASSIGN_OR_EXIT(const auto lease_time, FailUsage, LeaseOf(lease));
  shape.layers = static_cast<int32_t>(layers);
  options.shapes = {shape};
  options.lease = lease_time;
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags.server));
  return PrintMade(client::CreateCache(*server, options), flags.json);
}

ExitCode RunFork(CommandArguments arguments) {
  CacheFlags flags;
  ExpectedFlags expected;
  client::ForkOptions options;
  double lease = 0;
  const CommandLine line{
      .usage = "rapt cache fork ID [flags]",
      .summary =
          "Makes a cache of the first tokens of every layer of another one, and prints its "
          "id. Both share the memory of these tokens.",
      .flags = {{"length", "N", "tokens (default: those of the shortest layer)", &options.length},
                expected.GenerationFlag(),
                {"name", "NAME", "return the fork of this name if there is one", &options.name},
                {"reserve-tokens", "N", "take the pages of N tokens of every layer now",
                 &options.reserve_tokens},
                {"lease", "SECONDS", "how long it lives unused (default: as ID)", &lease}},
      .examples = {"rapt cache fork $ID", "rapt cache fork $ID --length 2 --json"},
      .max_operands = 1};
  if (const auto done = flags.Parse(line, arguments, 1)) return *done;
  RAPT_ASSIGN_OR_EXIT(const auto lease_time, FailUsage, LeaseOf(lease));
  options.lease = lease_time;
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags.server));
  RAPT_ASSIGN_OR_EXIT(const CacheInfo info, FailCall,
                      FindCache(*server, flags.operands[0], expected));
  return PrintMade(client::BorrowCache(*server, info).Fork(options), flags.json);
}

ExitCode RunTruncate(CommandArguments arguments) {
  CacheFlags flags;
  ExpectedFlags expected;
  int64_t length = 0;
  const CommandLine line{
      .usage = "rapt cache truncate ID --length N [flags]",
      .summary = "Keeps the first tokens of every layer, and prints the new generation.",
      .flags = {{"length", "N", "tokens of each layer that stay", &length, '\0', true},
                expected.GenerationFlag()},
      .examples = {"rapt cache truncate $ID --length 2",
                   "rapt cache truncate $ID --length 0 --generation 1 --json"},
      .max_operands = 1};
  if (const auto done = flags.Parse(line, arguments, 1)) return *done;
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags.server));
  absl::StatusOr<CacheInfo> info = FindCache(*server, flags.operands[0], expected);
  if (!info.ok()) return FailCall(info.status());
  client::Cache cache = client::BorrowCache(*server, *info);
  RAPT_EXIT_IF_ERROR(FailCall, cache.Truncate(length));
  if (!flags.json) {
    absl::PrintF("generation %d\n", cache.generation());
    return ExitCode::kOk;
  }
  info = cache.Refresh();
  if (!info.ok()) return FailCall(info.status());
  PrintJson(*info);
  return ExitCode::kOk;
}

ExitCode RunList(CommandArguments arguments) {
  CacheFlags flags;
  std::string prefix;
  const CommandLine line{
      .usage = "rapt cache list [flags]",
      .summary = "Lists your caches, in the order of their making.",
      .flags = {{"prefix", "TEXT", "those whose names begin with TEXT", &prefix}},
      .examples = {"rapt cache list", "rapt cache list --prefix chat --json"}};
  if (const auto done = flags.Parse(line, arguments, 0)) return *done;
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags.server));
  RAPT_ASSIGN_OR_EXIT(const auto caches, FailCall, client::ListCaches(*server, prefix));
  if (!flags.json) {
    PrintTable(caches);
    return ExitCode::kOk;
  }
  JsonWriter json;
  json.BeginObject().Key("caches").BeginArray();
  for (const CacheInfo& cache : caches) Write(cache, json);
  std::puts(json.EndArray().EndObject().Take().c_str());
  return ExitCode::kOk;
}

ExitCode RunShow(CommandArguments arguments) {
  CacheFlags flags;
  const CommandLine line{.usage = "rapt cache show ID [flags]",
                         .summary = "Shows a cache. Does not renew its lease.",
                         .flags = {},
                         .examples = {"rapt cache show $ID", "rapt cache show $ID --json"},
                         .max_operands = 1};
  if (const auto done = flags.Parse(line, arguments, 1)) return *done;
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags.server));
  RAPT_ASSIGN_OR_EXIT(const CacheInfo info, FailCall, FindCache(*server, flags.operands[0], {}));
  (flags.json ? PrintJson : Print)(info);
  return ExitCode::kOk;
}

ExitCode RunClose(CommandArguments arguments) {
  CacheFlags flags;
  const CommandLine line{.usage = "rapt cache close ID... [flags]",
                         .summary = "Closes caches. Their memory is free when no call uses it.",
                         .flags = {},
                         .examples = {"rapt cache close $ID", "rapt cache close $ID --json"},
                         .max_operands = kMaxIds};
  if (const auto done = flags.Parse(line, arguments, 1)) return *done;
  RAPT_ASSIGN_OR_EXIT(const auto server, FailConnect, Connect(flags.server));
  RAPT_ASSIGN_OR_EXIT(const auto closed, FailCall, client::CloseCaches(*server, flags.operands));
  JsonWriter json;
  json.BeginObject().Key("closed").BeginArray();
  for (const CacheInfo& cache : closed.caches) {
    if (flags.json) {
      Write(cache, json);
    } else {
      absl::PrintF("closed %s\n", cache.id);
    }
  }
  if (flags.json) std::puts(json.EndArray().EndObject().Take().c_str());
  if (closed.missing.empty()) return ExitCode::kOk;
  const client::MissingCache& first = closed.missing.front();
  return FailCall(absl::NotFoundError(
      absl::StrCat(closed.missing.size(), " of ", flags.operands.size(),
                   " caches are not found; first '", first.id, "': ", first.reason)));
}

constexpr Command kCommands[] = {
    {"create", "make a cache and print its id", RunCreate},
    {"append", "append keys and values of tokens to a layer", RunCacheAppend},
    {"attend", "attend over a layer, after appending to it", RunCacheAttend},
    {"diagnose", "explain a result that looks wrong", RunCacheDiagnose},
    {"fork", "make a cache of another one's first tokens", RunFork},
    {"truncate", "keep the first tokens only", RunTruncate},
    {"list", "list your caches", RunList},
    {"show", "show one cache", RunShow},
    {"close", "close caches", RunClose},
    {"export", "copy a cache to a file or to another server", RunCacheExport},
    {"import", "make a cache of a file", RunCacheImport},
};

}  // namespace

ExitCode RunCacheCommand(CommandArguments arguments) {
  if (!arguments.empty() && (arguments[0] == "--help" || arguments[0] == "-h")) {
    PrintCommands(
        "rapt cache",
        "Keeps keys and values with a server, which needs --kv_cache_bytes. The caches are "
        "those\nof one server: --address must name one only.",
        kCommands);
    return ExitCode::kOk;
  }
  return RunNamed("rapt cache", kCommands, arguments);
}

}  // namespace rapt
