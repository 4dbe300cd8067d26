#include "client/load/settings.h"

#include <algorithm>
#include <cmath>
#include <fstream>
#include <iterator>
#include <thread>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt::load {
namespace {

using std::chrono::nanoseconds;

constexpr int64_t kMaxStreams = 100'000;
constexpr int64_t kMaxConnections = 4096;

// The scenarios of MLPerf's load generator, with its metrics.
struct Scenario {
  const char* name;
  int64_t concurrency;
  int group;
  bool needs_rate;
};
constexpr Scenario kScenarios[] = {
    {"single-stream", 1, 1, false},  // metric: 90th percentile of latency
    {"multi-stream", 8, 8, false},   // metric: 99th percentile of queries of eight
    {"server", 64, 1, true},         // metric: highest rate that meets the 99th percentile
    {"offline", 64, 1, false},       // metric: throughput
};

nanoseconds ToNanoseconds(double seconds) {
  return std::chrono::duration_cast<nanoseconds>(std::chrono::duration<double>(seconds));
}

absl::Status CheckRange(std::string_view flag, double value, double least, double most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrFormat("--%s is %g; it takes %g to %g", flag, value, least, most));
}

absl::StatusOr<std::string> ReadFile(std::string_view flag, const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) {
    return absl::NotFoundError(absl::StrFormat("--%s: can't read %s", flag, path));
  }
  return std::string(std::istreambuf_iterator<char>(file), {});
}

absl::Status CheckNumbers(const LoadFlags& flags) {
  constexpr double kDay = 86400;
  for (const absl::Status& status :
       {CheckRange("duration", flags.duration_s, 0.01, kDay),
        CheckRange("warmup", flags.warmup_s, 0, kDay),
        CheckRange("requests", static_cast<double>(flags.requests), 0, 1e12),
        CheckRange("deadline", flags.deadline_ms, 0.1, kDay * 1000),
        CheckRange("threads", static_cast<double>(flags.threads), 1, 1024),
        CheckRange("steps", static_cast<double>(flags.steps), 1, 1e6),
        CheckRange("variants", static_cast<double>(flags.variants), 1, 1024),
        CheckRange("concurrency", static_cast<double>(flags.concurrency.value_or(1)), 1,
                   kMaxStreams),
        CheckRange("connections", static_cast<double>(flags.connections.value_or(1)), 1,
                   kMaxConnections),
        CheckRange("slo", flags.slo_ms.value_or(1), 0.001, kDay * 1000),
        CheckRange("max-errors", flags.max_errors, 0, 100)}) {
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Over HTTP/1.1, a connection carries one call at a time.
absl::Status CheckHttp(const LoadFlags& flags) {
  const std::pair<const char*, bool> excluded[] = {{"cache", flags.cache.has_value()},
                                                   {"stream", flags.stream},
                                                   {"shared-memory", flags.shared_memory},
                                                   {"connections", flags.connections.has_value()}};
  for (const auto& [flag, is_set] : excluded) {
    if (!is_set) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "--protocol http excludes --%s: it sends calls of /v2/models/MODEL/infer, each of the "
        "--concurrency calls over a connection of its own",
        flag));
  }
  const bool has_plain_name = std::all_of(flags.model.begin(), flags.model.end(), [](char c) {
    return absl::ascii_isalnum(static_cast<unsigned char>(c)) || c == '_' || c == '-' || c == '.';
  });
  if (has_plain_name && !flags.model.empty()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrFormat(
      "--model is '%s'; with --protocol http it takes letters, digits, '_', '-' and '.'",
      flags.model));
}

absl::StatusOr<Protocol> ReadProtocol(const std::string& name) {
  constexpr std::pair<const char*, Protocol> kProtocols[] = {
      {"rapt", Protocol::kRapt}, {"oip", Protocol::kOip}, {"http", Protocol::kHttp}};
  for (const auto& [known, protocol] : kProtocols) {
    if (name == known) return protocol;
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("--protocol is '%s'; it takes rapt, oip or http", name));
}

absl::StatusOr<Interface> ReadInterface(const LoadFlags& flags) {
  Interface interface;
  RAPT_ASSIGN_OR_RETURN(const Protocol protocol, ReadProtocol(flags.protocol));
  interface.protocol = protocol;
  if (protocol == Protocol::kHttp) {
    RAPT_RETURN_IF_ERROR(CheckHttp(flags));
  }
  interface.model = flags.model;
  if (flags.shared_memory && flags.stream) {
    return Invalid("--shared-memory and --stream are mutually exclusive");
  }
  if (flags.shared_memory) {
    if (!client::IsSameMachine(flags.server.address)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "--shared-memory needs a server on this machine; --address is %s", flags.server.address));
    }
    interface.transport = Transport::kSharedMemory;
  }
  if (flags.stream) {
    interface.transport = Transport::kStream;
  }
  return interface;
}

absl::StatusOr<const Scenario*> FindScenario(const LoadFlags& flags) {
  if (flags.scenario.empty()) return nullptr;
  for (const Scenario& scenario : kScenarios) {
    if (flags.scenario != scenario.name) continue;
    if (flags.concurrency && scenario.group > 1) {
      return absl::InvalidArgumentError(
          absl::StrFormat("--concurrency is fixed by --scenario %s", scenario.name));
    }
    if (scenario.needs_rate && !flags.rate && !flags.search) {
      return Invalid("--scenario server needs --rate, or --search with --slo");
    }
    if (!scenario.needs_rate && (flags.rate || flags.trace || flags.search)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "--scenario %s is a closed loop; it excludes --rate, --trace and --search",
          scenario.name));
    }
    return &scenario;
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("--scenario is '%s'; it takes single-stream, multi-stream, server or offline",
                      flags.scenario));
}

// A load on caches is a closed loop of unary calls.
absl::Status CheckCache(const LoadFlags& flags) {
  const std::pair<const char*, bool> excluded[] = {{"protocol oip", flags.protocol == "oip"},
                                                   {"stream", flags.stream},
                                                   {"shared-memory", flags.shared_memory},
                                                   {"scenario", !flags.scenario.empty()},
                                                   {"rate", flags.rate.has_value()},
                                                   {"trace", flags.trace.has_value()},
                                                   {"search", flags.search}};
  for (const auto& [flag, is_set] : excluded) {
    if (!is_set) continue;
    return absl::InvalidArgumentError(absl::StrFormat(
        "--cache excludes --%s: its calls go to rapt.v1.CacheService in a closed loop", flag));
  }
  return absl::OkStatus();
}

absl::Status Prefix(std::string_view flag, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(), absl::StrFormat("--%s: %s", flag, status.message()));
}

absl::StatusOr<std::vector<CallShape>> ReadShapes(const LoadFlags& flags, const std::string& text) {
  const absl::StatusOr<client::DType> dtype = ParseDType(flags.dtype);
  if (!dtype.ok()) return Prefix("dtype", dtype.status());
  const absl::StatusOr<MaskKind> mask = ParseMask(flags.mask);
  if (!mask.ok()) return Prefix("mask", mask.status());
  auto shapes = ParseMix(text, flags.variants, {*dtype, flags.causal, flags.ragged, *mask});
  if (!shapes.ok()) return Prefix("shape", shapes.status());
  return shapes;
}

// Returns the text of the flag, or of the file that it names as @FILE.
absl::StatusOr<std::string> ShapesText(const std::string& flag) {
  if (!absl::StartsWith(flag, "@")) return flag;
  return ReadFile("shape", flag.substr(1));
}

absl::Status SetRate(const LoadFlags& flags, Load& load) {
  RAPT_ASSIGN_OR_RETURN(auto segments, ParseRate(*flags.rate, load.duration));
  if (load.warmup.count() > 0) {
    const double first = segments.front().from;
    segments.insert(segments.begin(), {load.warmup, first, first});
  }
  if (flags.arrivals == "poisson") {
    load.arrivals = Arrivals::AtRandom(std::move(segments), flags.seed);
  } else if (flags.arrivals == "constant") {
    load.arrivals = Arrivals::Evenly(std::move(segments));
  } else {
    return absl::InvalidArgumentError(
        absl::StrFormat("--arrivals is '%s'; it takes poisson or constant", flags.arrivals));
  }
  return absl::OkStatus();
}

absl::Status SetTrace(const LoadFlags& flags, Settings& settings) {
  RAPT_ASSIGN_OR_RETURN(const std::string text, ReadFile("trace", *flags.trace));
  absl::StatusOr<Trace> trace = ParseTrace(text);
  if (!trace.ok()) return Prefix("trace", trace.status());
  if (!trace->shapes.empty()) {
    std::vector<CallShape> shapes;
    for (const std::string& shape : trace->shapes) {
      RAPT_ASSIGN_OR_RETURN(auto one, ReadShapes(flags, shape));
      if (one.size() != 1) {
        return absl::InvalidArgumentError(
            absl::StrFormat("--trace: '%s' is a mix; a line must have a single shape", shape));
      }
      shapes.push_back(one.front());
    }
    settings.shapes = std::move(shapes);
    settings.load.shape_of = std::move(trace->shape_of);
  }
  // The trace ends with its last call, and all of it is measured.
  settings.load.warmup = nanoseconds(0);
  settings.load.duration = std::chrono::hours(24 * 365);
  settings.load.arrivals = Arrivals::Replay(std::move(trace->times));
  return absl::OkStatus();
}

absl::Status SetLoop(const LoadFlags& flags, const Scenario* scenario, Settings& settings) {
  Load& load = settings.load;
  if (flags.rate && flags.trace) {
    return Invalid("--rate and --trace are mutually exclusive");
  }
  if (flags.search && (flags.rate || flags.trace)) {
    return Invalid("--search excludes --rate and --trace; it finds the rate");
  }
  if (flags.search && !flags.slo_ms) {
    return Invalid("--search needs --slo MS");
  }
  const bool is_open = flags.rate || flags.trace || flags.search;
  const int64_t default_streams = scenario != nullptr ? scenario->concurrency : is_open ? 64 : 1;
  load.streams = static_cast<int>(flags.concurrency.value_or(default_streams));
  load.group = scenario != nullptr ? scenario->group : 1;
  // More connections of gRPC hardly help on loopback, and each one costs server time.
  const bool multiplexes = load.interface.protocol != Protocol::kHttp;
  settings.options.connections = static_cast<int>(
      multiplexes ? flags.connections.value_or(std::min<int64_t>(load.streams, 4)) : load.streams);
  if (flags.rate) return SetRate(flags, load);
  if (flags.trace) return SetTrace(flags, settings);
  return absl::OkStatus();
}

void FillDisplay(const LoadFlags& flags, Settings& settings) {
  const auto add = [&settings](const char* name, const auto& value) {
    settings.display.emplace_back(name, absl::StrCat(value));
  };
  add("address", flags.server.address);
  add("protocol", flags.protocol);
  add("transport", flags.shared_memory ? "shared memory" : flags.stream ? "stream" : "unary");
  add("loop", flags.search  ? "search"
              : flags.trace ? "open, trace"
              : flags.rate  ? absl::StrCat("open, ", flags.arrivals)
                            : std::string("closed"));
  add("offered", flags.trace.value_or(flags.rate.value_or("")));
  add("concurrency", settings.load.streams);
  add("connections", settings.options.connections);
  add("threads", flags.threads);
  if (flags.cache) {
    add("cache", *flags.cache);
    add("steps", flags.steps);
  }
  add("shapes", flags.trace && !settings.load.shape_of.empty() ? "the trace's" : flags.shapes);
  add("dtype", flags.dtype);
  add("causal", flags.causal ? "yes" : "no");
  add("ragged", flags.ragged ? "yes" : "no");
  add("mask", flags.mask);
  add("warmup_s", flags.warmup_s);
  add("duration_s", flags.duration_s);
  add("deadline_ms", flags.deadline_ms);
  add("seed", flags.seed);
}

}  // namespace

std::vector<Flag> LoadFlags::Table() {
  std::vector<Flag> table = server.Table();
  std::erase_if(table, [](const Flag& flag) { return flag.name == "timeout"; });  // --deadline
  const Flag ours[] = {
      {"protocol", "NAME",
       "rapt; oip for the Open Inference Protocol over gRPC; http for the same over HTTP/1.1, with "
       "binary tensors, at the server's --http_address (default: rapt)",
       &protocol},
      {"model", "NAME", "model for --protocol oip and http (default: attention)", &model},
      {"shared-memory", "", "pass tensors in shared memory; needs a server on this machine",
       &shared_memory},
      {"stream", "", "one stream per call; in chunks with --protocol rapt", &stream},

      {"shape", "SHAPES",
       "BxHxSxD; Hq/Hkv for H, Sq:Sk for S; 128..2048 or ~512 for a varying length; then any of "
       "fp16, causal, ragged, mask=bool, weight=3; separate shapes by commas; or a mix: tutorial, "
       "prefill-decode, tiny, short; or @FILE (default: 1x8x1024x64)",
       &shapes, 's'},
      {"dtype", "TYPE", "type of shapes without one: fp32, fp16, bf16 or fp64 (default: fp32)",
       &dtype},
      {"mask", "KIND", "mask of shapes without one: none, bool, float or padding (default: none)",
       &mask},
      {"causal", "", "make all shapes causal", &causal},
      {"ragged", "", "give all shapes random key lengths per batch row, with the alignment of ONNX",
       &ragged},
      {"variants", "N", "number of lengths drawn for a varying length (default: 8)", &variants},

      {"scenario", "NAME", "MLPerf scenario: single-stream, multi-stream, server or offline",
       &scenario},
      {"cache", "KIND",
       "sequences whose keys and values stay with the server, a prompt as long as the shape's "
       "keys: "
       "decode (prompts before the load; steps of one token, or Sq of Sq:Sk), prefill-decode "
       "(prompts are measured, too) or shared-prefix (forks of one prompt)",
       &cache},
      {"steps", "N",
       "with --cache: steps of a sequence, which then begins again after its prompt or, with "
       "prefill-decode, ends (default: 128)",
       &steps},
      {"concurrency", "N",
       "calls in flight: constant in a closed loop (default: 1), the maximum in an open loop "
       "(default: 64)",
       &concurrency, 'c'},
      {"rate", "R", "open loop: requests/s; 10..500 for a ramp, 10..500/5 for 5 steps", &rate, 'r'},
      {"arrivals", "KIND", "arrivals of --rate: poisson or constant (default: poisson)", &arrivals},
      {"trace", "FILE", "open loop: replay lines of seconds since the start and an optional shape",
       &trace},
      {"connections", "N",
       "connections to the server (default: 4, at most --concurrency; one for each call in flight "
       "with --protocol http)",
       &connections},
      {"threads", "N", "threads that receive responses (default: 1)", &threads},

      {"duration", "SECONDS", "measured time (default: 10)", &duration_s, 'd'},
      {"warmup", "SECONDS", "time before the measurement (default: 1)", &warmup_s},
      {"requests", "N", "continue until N calls are measured (default: 0)", &requests},
      {"deadline", "MS", "deadline of each call, from when it is due (default: 60000)",
       &deadline_ms},
      {"seed", "N", "seed of arrivals, shapes and tensors (default: 0)", &seed},

      {"slo", "MS", "objective: 99th percentile of latency; exit code 1 if missed", &slo_ms},
      {"max-errors", "PERCENT", "objective: calls that may fail, with --slo (default: 0)",
       &max_errors},
      {"search", "", "find the highest rate that meets --slo", &search},

      {"label", "TEXT", "label in the reports", &label},
      {"json", "FILE", "write the result as JSON; - for standard output", &json},
      {"csv", "FILE", "append a line of figures", &csv},
      {"html", "FILE", "write a page with charts", &html},
      {"quiet", "", "show no progress", &quiet, 'q'}};
  table.insert(table.end(), std::begin(ours), std::end(ours));
  return table;
}

absl::StatusOr<Settings> MakeSettings(const LoadFlags& flags) {
  RAPT_RETURN_IF_ERROR(CheckNumbers(flags));
  RAPT_ASSIGN_OR_RETURN(const Scenario* const scenario, FindScenario(flags));
  RAPT_ASSIGN_OR_RETURN(const Interface interface, ReadInterface(flags));
  RAPT_ASSIGN_OR_RETURN(const std::string text, ShapesText(flags.shapes));
  RAPT_ASSIGN_OR_RETURN(std::vector<CallShape> shapes, ReadShapes(flags, text));
  RAPT_ASSIGN_OR_RETURN(client::Options options, OptionsOf(flags.server));
  Settings settings{.address = flags.server.address,
                    .options = std::move(options),
                    .shapes = std::move(shapes),
                    .searches = flags.search,
                    .scenario = flags.scenario};
  Load& load = settings.load;
  load.interface = interface;
  // Servers of gRPC's own library reject frequent pings.
  if (interface.protocol == Protocol::kOip) settings.options.max_silence = {};
  load.threads = static_cast<int>(flags.threads);
  load.warmup = ToNanoseconds(flags.warmup_s);
  load.duration = ToNanoseconds(flags.duration_s);
  load.min_requests = flags.requests;
  load.deadline = ToNanoseconds(flags.deadline_ms * 1e-3);
  // About 60 points per chart.
  load.interval = ToNanoseconds(std::clamp(flags.duration_s / 60, 0.1, 10.0));
  load.seed = flags.seed;
  if (flags.cache) {
    const absl::StatusOr<CacheScenario> cache = ParseCacheScenario(*flags.cache);
    if (!cache.ok()) return Prefix("cache", cache.status());
    RAPT_RETURN_IF_ERROR(CheckCache(flags));
    settings.cache = *cache;
    settings.steps = flags.steps;
  }
  if (flags.slo_ms) {
    settings.objective = Objective{*flags.slo_ms, flags.max_errors / 100};
    load.slo = ToNanoseconds(*flags.slo_ms * 1e-3);
  }
  RAPT_RETURN_IF_ERROR(SetLoop(flags, scenario, settings));
  FillDisplay(flags, settings);
  return settings;
}

absl::StatusOr<std::unique_ptr<Workload>> MakeWorkload(const Settings& settings) {
  const Load& load = settings.load;
  if (!settings.cache) return RepeatCalls(load.interface, settings.shapes, load.seed);
  auto workload = KeepSequences({.scenario = *settings.cache,
                                 .steps = settings.steps,
                                 .deadline = load.deadline,
                                 .seed = load.seed},
                                settings.shapes);
  if (!workload.ok()) return Prefix("shape", workload.status());
  return workload;
}

}  // namespace rapt::load
