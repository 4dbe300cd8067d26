#include "server/options.h"

#include <arpa/inet.h>

#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <CLI/Formatter.hpp>
#include <algorithm>
#include <charconv>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/flags/marshalling.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "attention/problem_text.h"
#include "base/arguments.h"
#include "base/checked_math.h"
#include "base/host_port.h"
#include "base/invalid.h"
#include "base/range.h"
#include "base/status_macros.h"
#include "base/version.h"
#include "server/cache/limits.h"

namespace rapt {
namespace {

using std::chrono::milliseconds;

constexpr int64_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kMaxCalls = 1 << 20;
constexpr int64_t kDay = milliseconds(std::chrono::hours(24)).count();
constexpr int64_t kDefaultCudnnMemoryBytes = int64_t{4} << 30;
constexpr int64_t kMinCudnnMemoryBytes = int64_t{64} << 20;
constexpr double kMemoryShare = 0.6;
constexpr absl::string_view kVariablePrefix = "RAPT_";

// A range of numbers, of bytes, or of durations in milliseconds.
struct Range {
  int64_t least;
  int64_t most;
  bool is_bytes = false;
};
constexpr Range kDuration = {0, kDay};
constexpr Range kPositiveDuration = {1, kDay};
constexpr Range kCount = {1, kMaxCalls};
constexpr Range Bytes(int64_t least, int64_t most) { return {least, most, true}; }
constexpr Range kBytes = Bytes(0, kCounts.most);

// One setting. Its initial value is the default.
struct Setting {
  absl::string_view name;
  std::variant<bool*, int64_t*, std::optional<int64_t>*, milliseconds*, std::string*, LogFormat*,
               FileMode*, std::vector<Problem>*>
      value;
  absl::string_view help;
  Range range = {kCounts.least, kCounts.most};
};

// In the order of --help.
std::vector<Setting> SettingsOf(Options& o) {
  return {
      {"grpc_address", &o.grpc.address,
       "where to serve gRPC; port 0 selects a free port; empty: only on --unix_socket"},
      {"unix_socket", &o.grpc.unix_socket,
       "the path of a Unix domain socket to serve gRPC on as well, for clients at unix:PATH; an "
       "empty --grpc_address serves only there"},
      {"unix_socket_mode", &o.grpc.unix_socket_mode,
       "the file mode of the socket, in octal digits; determines who may connect"},
      {"http_address", &o.http.address,
       "where to serve the Open Inference Protocol over HTTP, below /v2, and rapt.v1; port 0 "
       "selects a free port; empty: nowhere"},
      {"max_json_bytes", &o.http.max_json_bytes,
       "the most bytes of JSON in a request or an answer; tensors as binary data do not count",
       // As text, numbers in it become at most 6 times as long; Protocol Buffers has 2 GiB.
       Bytes(1, int64_t{256} << 20)},
      {"http_hosts", &o.http.hosts,
       "names by which clients reach --http_address in plain text, separated by commas: "
       "rapt.example.org, or *.example.org for all below it, or * for any; IP addresses, localhost "
       "and the name of this machine need not be listed; calls to other hosts are refused. This "
       "also refuses web pages that reach the server by DNS rebinding"},
      {"http_allow_origin", &o.http.allow_origin,
       "origins of web pages that may call --http_address, separated by commas: "
       "https://example.org; empty: none"},
      {"explorer", &o.http.explorer,
       "serve the explorer, a web page that shows what attention does, at / of --http_address"},
      {"max_connections", &o.grpc.max_connections,
       "connections to --grpc_address that may be open at once; further ones are closed; as many "
       "to --http_address, where they replace idle ones; fewer if open descriptors are limited",
       kCount},
      {"max_connections_per_address",
       &o.grpc.max_connections_per_address,
       "connections that may be open at once from one IPv4 address or one /64 of IPv6; 0: a "
       "quarter "
       "of --max_connections",
       {0, kMaxCalls}},
      {"max_streams_per_connection", &o.grpc.max_streams_per_connection,
       "calls that may be open on one connection; further ones wait in the client", kCount},
      {"max_connection_idle", &o.grpc.max_connection_idle,
       "connections without a call for this long are closed", kPositiveDuration},
      {"max_connection_age", &o.grpc.max_connection_age,
       "older connections are closed once their calls have ended; 0: unlimited", kDuration},
      {"reflection", &o.grpc.reflection, "serve gRPC reflection, which lists the services"},
      {"metrics_address", &o.metrics_address,
       "where to serve /metrics, /healthz and /readyz over HTTP; port 0 selects a free port"},
      {"tls_cert", &o.security.tls_cert,
       "the file of the server's certificate chain, in PEM, for TLS on --grpc_address and "
       "--http_address; reloaded when it is replaced and on SIGHUP, like the next three"},
      {"tls_key", &o.security.tls_key, "the file of its private key, in PEM without a passphrase"},
      {"tls_client_ca", &o.security.tls_client_ca,
       "a file of certificate authorities in PEM: clients must present a certificate signed by one "
       "of them; empty: clients need none"},
      {"token_file", &o.security.token_file,
       "a file with a line NAME SHA256 for each bearer token, the hash in hexadecimal digits: "
       "clients must send one of them, over TLS or --unix_socket; empty: they need none"},
      {"insecure", &o.security.insecure,
       "serve in plain text on addresses that are not loopback: metrics, and gRPC without "
       "--tls_cert"},
      {"backend", &o.compute.backend,
       "auto, cpu, reference or, in builds that have it, cudnn; auto uses the first that can "
       "compute a request"},
      {"isa", &o.compute.isa,
       "the instruction set of the cpu backend: auto, amx, avx512_bf16, avx512, avx2 or portable; "
       "auto uses the first of these that the machine supports"},
      {"threads",
       &o.compute.threads,
       "compute threads, 1 to 1024; 0: one for each available core; under a CPU limit of a cgroup, "
       "less those that the network threads need",
       {0, kMaxThreads}},
      {"stall_timeout",
       &o.compute.stall_timeout,
       "the watchdog's timeout: the server is not ready if the compute threads or the network "
       "threads make no progress for this long",
       {100, kDay}},
      {"memory_budget_bytes", &o.admission.memory_budget_bytes,
       "the memory of all requests together; 0: 60 % of the available memory", kBytes},
      {"max_queued_requests",
       &o.admission.max_queued_requests,
       "requests that may wait for memory; 0: none",
       {0, kMaxCalls}},
      {"max_queue_delay", &o.admission.max_queue_delay, "how long a request may wait for memory",
       kDuration},
      {"max_message_bytes", &o.calls.max_message_bytes,
       "the largest message that is received, 1 to 2147483647; 0: 256 MiB, or half of the budget's "
       "share for messages if that is less",
       Bytes(0, kMaxInt32)},
      {"max_open_calls", &o.calls.max_open_calls, "tensor calls that may be open at once", kCount},
      {"max_calls_per_caller", &o.calls.max_calls_per_caller,
       "tensor calls that one caller may have open at once; a caller is identified by its token, "
       "else its certificate, else its address",
       kCount},
      {"min_receive_bytes_per_second", &o.calls.min_receive_bytes_per_second,
       "the minimum transfer rate of messages; slower calls are ended: requests after 2 s of "
       "grace, responses after 20 s",
       Bytes(1, kMaxInt32)},
      {"default_deadline", &o.calls.default_deadline, "the deadline of calls that set none",
       kPositiveDuration},
      {"max_deadline", &o.calls.max_deadline,
       "the longest deadline of a call; later ones are shortened to it", kPositiveDuration},
      {"drain_pause", &o.drain.pause,
       "how long new calls are still accepted after a stop signal, while readiness is already "
       "withdrawn, so that load balancers can react",
       kDuration},
      {"drain_refusal_time", &o.drain.refusal_time,
       "the minimum time after --drain_pause for which new calls are refused with UNAVAILABLE "
       "before the server stops listening",
       kDuration},
      {"grace_period", &o.drain.grace_period,
       "how long calls in flight may continue after SIGTERM or SIGINT", kDuration},
      {"log_format", &o.log.format, "the format of log lines: text or json"},
      {"slow_call", &o.log.slow_call,
       "calls that take this long are logged, with shape, stages and plan; 0: none", kDuration},
      {"model_repository", &o.model_repository,
       "a folder of layers: each folder in it, with config.json and model.safetensors, is a model "
       "of its name; their weights take part of --memory_budget_bytes; empty: none"},
      {"kv_cache_bytes", &o.cache.bytes,
       "memory for keys and values that stay with the server, on top of --memory_budget_bytes; 0: "
       "the server keeps none",
       kBytes},
      {"kv_max_caches_per_caller", &o.cache.max_caches_per_caller, "caches that a caller may have",
       kCount},
      {"kv_max_bytes_per_caller", &o.cache.max_bytes_per_caller,
       "bytes of pages that the caches of a caller may reach; 0: all", kBytes},
      {"kv_default_lease", &o.cache.default_lease,
       "how long a cache that is created without a lease stays after its last call",
       kPositiveDuration},
      {"kv_max_lease", &o.cache.max_lease, "the longest lease; longer ones are shortened to it",
       kPositiveDuration},
      {"instance_name", &o.cache.instance_name,
       "the name of this server in the ids of its caches, at most 86 bytes; the same after a "
       "restart; empty: the host's name and the bound --grpc_address"},
      {"allow_shared_memory", &o.shared_memory.allowed,
       "let clients on this machine pass tensors in POSIX shared memory that they register"},
      {"shared_memory_prefix", &o.shared_memory.prefix,
       "the required prefix of shared memory objects' names; empty: any"},
      {"cudnn_libraries", &o.cudnn.libraries,
       "directories of the CUDA 13 and cuDNN 9 libraries, separated by ':'; empty: the system's "
       "search path"},
      {"cudnn_memory_bytes", &o.cudnn.memory_bytes,
       "GPU memory for cudnn, and as much pinned host memory in addition to the budget; 0: 4 GiB "
       "with "
       "--backend=cudnn, else none, and auto does not use the GPU",
       kBytes},
      {"cudnn_kv_cache_bytes", &o.cudnn.kv_cache_bytes,
       "GPU memory for copies of resident keys and values, in addition to --cudnn_memory_bytes; 0: "
       "the cpu attends to them",
       kBytes},
      {"cudnn_min_flops", &o.cudnn.min_flops,
       "the GPU offload threshold: auto computes problems of fewer operations on the cpu; empty: "
       "measured at startup"},
      {"cudnn_plan_cache", &o.cudnn.plan_cache,
       "a directory for compiled kernels, which later starts read; empty: none"},
      {"cudnn_warm_plans", &o.cudnn.warm_plans,
       "shapes whose kernels, single and batched, are compiled before the server is ready, "
       "separated by commas: '1x32/8x4096x128 bf16 causal, 8x32/8x1:4096x128 bf16'"},
  };
}

using rapt::ParseValue;

absl::Status ParseValue(std::string_view name, const std::string& text, milliseconds& value) {
  absl::Duration duration;
  if (absl::ParseDuration(text, &duration)) {
    // A parsed duration is rounded to a quarter of a nanosecond.
    const bool is_rounded_to_0 =
        duration == absl::ZeroDuration() && text.find_first_of("123456789") != std::string::npos;
    value = absl::ToChronoMilliseconds(duration);
    if (absl::FromChrono(value) == duration && !is_rounded_to_0) return absl::OkStatus();
  }
  return BadValue(name, text, "a duration in whole milliseconds such as 20s or 500ms");
}

absl::Status ParseValue(std::string_view name, const std::string& text, LogFormat& value) {
  value = text == "json" ? LogFormat::kJson : LogFormat::kText;
  if (text == "json" || text == "text") return absl::OkStatus();
  return BadValue(name, text, "text or json");
}

absl::Status ParseValue(std::string_view name, const std::string& text, FileMode& value) {
  const char* const end = text.data() + text.size();
  unsigned bits = 0;
  const auto [unread, error] = std::from_chars(text.data(), end, bits, 8);
  value.bits = static_cast<int>(bits);
  if (error == std::errc() && unread == end && bits <= 0777) return absl::OkStatus();
  return BadValue(name, text, "octal digits from 0 to 0777, such as 0660");
}

absl::Status ParseValue(std::string_view name, const std::string& text,
                        std::vector<Problem>& value) {
  value.clear();
  if (text.empty()) return absl::OkStatus();
  absl::StatusOr<std::vector<Problem>> problems = ParseProblems(text);
  if (!problems.ok()) {
    return Invalid(std::string(name), ": ", problems.status().message());
  }
  value = *std::move(problems);
  return absl::OkStatus();
}

// Returns the bytes that a suffix stands for: 1 for "", 2^30 for "G", "Gi" and "GiB".
std::optional<int64_t> UnitOf(absl::string_view suffix) {
  constexpr absl::string_view kLetters = "KMGT";
  if (suffix.empty()) return 1;
  const size_t power = kLetters.find(absl::ascii_toupper(static_cast<unsigned char>(suffix[0])));
  const absl::string_view rest = suffix.substr(1);
  if (power == absl::string_view::npos || !(rest.empty() || rest == "i" || rest == "iB"))
    return std::nullopt;
  return int64_t{1024} << (10 * power);
}

absl::Status ParseBytes(std::string_view name, const std::string& text, int64_t& value) {
  const absl::string_view all = text;
  const absl::string_view digits = all.substr(0, all.find_first_not_of("0123456789"));
  const std::optional<int64_t> unit = UnitOf(all.substr(digits.size()));
  std::optional<int64_t> bytes;
  if (int64_t number; unit && absl::SimpleAtoi(digits, &number)) bytes = CheckedMul(number, *unit);
  if (!bytes) return BadValue(name, text, "a number of bytes such as 8589934592, 8G or 512MiB");
  value = *bytes;
  return absl::OkStatus();
}

// `source` is the name that the user set: "--threads" or "RAPT_THREADS".
absl::Status Set(const Setting& setting, const std::string& source, const std::string& text) {
  if (setting.range.is_bytes) return ParseBytes(source, text, *std::get<int64_t*>(setting.value));
  return std::visit([&](auto* value) { return ParseValue(source, text, *value); }, setting.value);
}

template <typename T>
std::string Show(const T& value) {
  return absl::UnparseFlag(value);
}
std::string Show(const milliseconds& value) {
  return absl::FormatDuration(absl::FromChrono(value));
}
std::string Show(const LogFormat& value) { return value == LogFormat::kJson ? "json" : "text"; }
std::string Show(const FileMode& value) { return absl::StrFormat("%04o", value.bits); }
std::string Show(const std::vector<Problem>&) { return ""; }  // the default

// Returns an error that names the range if the value is outside.
template <typename T>
absl::Status CheckRange(const Setting& setting, const T& value) {
  if constexpr (std::is_same_v<T, std::optional<int64_t>>) {
    if (value) return CheckRange(setting, *value);
  } else if constexpr (std::is_same_v<T, int64_t> || std::is_same_v<T, milliseconds>) {
    const T least{setting.range.least}, most{setting.range.most};
    if (value >= least && value <= most) return absl::OkStatus();
    return Invalid("--", setting.name, " is ", Show(value), "; it must be from ", Show(least),
                   " to ", Show(most));
  }
  return absl::OkStatus();
}

std::string VariableOf(const Setting& setting) {
  return absl::StrCat(kVariablePrefix, absl::AsciiStrToUpper(setting.name));
}

// Whether another program reads the variable, or Kubernetes sets it in each pod for a service that
// is named rapt or rapt-...: RAPT_SERVICE_HOST, RAPT_PORT_8001_TCP.
bool IsOfOthers(absl::string_view variable) {
  constexpr absl::string_view kOfClients[] = {"RAPT_ADDRESS", "RAPT_LIBRARY", "RAPT_TLS_CA"};
  return std::find(std::begin(kOfClients), std::end(kOfClients), variable) !=
             std::end(kOfClients) ||
         absl::StrContains(variable, "_SERVICE_HOST") ||
         absl::StrContains(absl::StrCat(variable, "_"), "_PORT_");
}

std::string UnknownVariable(absl::Span<const Setting> settings, const std::string& variable) {
  std::vector<std::string> names;
  for (const Setting& setting : settings) names.push_back(VariableOf(setting));
  const std::vector<std::string_view> known(names.begin(), names.end());
  const std::string_view nearest = Nearest(variable, known);
  return absl::StrCat("unknown variable ", variable,
                      nearest.empty() ? "; --help lists the flags"
                                      : "; did you mean " + std::string(nearest) + "?");
}

// A variable that is set but empty counts as not set, as in `RAPT_ISA= rapt-server`. An unknown one
// is no error: it may be meant for something else of that name.
absl::Status SetFromEnvironment(absl::Span<const Setting> settings, Environment environment,
                                std::vector<std::string>& warnings) {
  for (const char* const entry : environment) {
    const std::pair<std::string, std::string> variable =
        absl::StrSplit(entry, absl::MaxSplits('=', 1));
    const auto& [name, value] = variable;
    if (!absl::StartsWith(name, kVariablePrefix) || value.empty()) continue;
    const auto setting =
        std::find_if(settings.begin(), settings.end(),
                     [&variable](const Setting& s) { return VariableOf(s) == variable.first; });
    if (setting == settings.end()) {
      if (!IsOfOthers(name)) warnings.push_back(UnknownVariable(settings, name));
    } else {
      RAPT_RETURN_IF_ERROR(Set(*setting, name, value));
    }
  }
  return absl::OkStatus();
}

// The flags in a file of --flagfile. Empty lines and lines that begin with # are skipped.
absl::StatusOr<std::vector<std::string>> ReadFlagFile(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> flags;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    const absl::string_view flag = absl::StripAsciiWhitespace(line);
    if (flag.empty() || flag.front() == '#') continue;
    if (!absl::StartsWith(flag, "--") || absl::StartsWith(flag, "--flagfile")) {
      return Invalid("line ", number, " of --flagfile is not a flag; a line is --flag=value");
    }
    flags.emplace_back(flag);
  }
  if (file.eof()) return flags;
  return Invalid("the file of --flagfile can't be read");
}

absl::Status SetFromFile(absl::Span<const Setting> settings, const std::string& path);

// Applies the arguments in order. `app` has the other flags: --help, --version and --flagfile.
// Returns the text that --help or --version prints.
absl::StatusOr<std::string> SetFromArguments(absl::Span<const Setting> settings,
                                             absl::Span<const std::string> arguments,
                                             CLI::App& app) {
  for (const Setting& setting : settings) {
    const bool is_switch = std::holds_alternative<bool*>(setting.value);
    AddFlag(app, absl::StrCat("--", setting.name), is_switch);
  }
  RAPT_ASSIGN_OR_RETURN(const ParsedArguments parsed, ParseArguments(app, arguments));
  if (!parsed.operands.empty()) {
    return Invalid("unexpected argument '", parsed.operands[0], "'; --help lists the flags");
  }
  for (const auto& [name, value] : parsed.flags) {
    // `flag` instead of `name`: Clang 14 can't capture a structured binding.
    const auto setting = std::find_if(settings.begin(), settings.end(),
                                      [&flag = name](const Setting& s) { return s.name == flag; });
    RAPT_RETURN_IF_ERROR(setting == settings.end() ? SetFromFile(settings, value)
                                                   : Set(*setting, "--" + name, value));
  }
  return parsed.text_to_print;
}

absl::Status SetFromFile(absl::Span<const Setting> settings, const std::string& path) {
  RAPT_ASSIGN_OR_RETURN(const std::vector<std::string> flags, ReadFlagFile(path));
  CLI::App app;
  app.set_help_flag();
  return SetFromArguments(settings, flags, app).status();
}

std::string HelpText() {
  std::string text =
      "Usage: rapt-server [--flag=value]...\n"
      "\n"
      "Computes attention for clients over gRPC, by the Open Inference Protocol and rapt.v1, and "
      "over "
      "HTTP, by the former.\n"
      "\n";
  Options defaults;
  for (const Setting& setting : SettingsOf(defaults)) {
    const std::string value = std::visit([](auto* v) { return Show(*v); }, setting.value);
    absl::StrAppend(&text, "  --", setting.name, "=", value, "\n      ", setting.help, "\n");
  }
  absl::StrAppend(&text, "\nEach flag has an environment variable, such as RAPT_GRPC_ADDRESS for ",
                  "--grpc_address; the flag overrides it. Unknown RAPT_ variables are logged.\n",
                  "Numbers of bytes may end in K, M, G or T, powers of 1024; KiB is K, and so on: ",
                  "8G, 512MiB.\n", "--flagfile=FILE reads flags from a file, one per line.\n",
                  "Once ready, prints: rapt-server ready grpc=HOST:PORT metrics=HOST:PORT\n",
                  "and how each is secured (grpc=HOST:PORT,unix:PATH with a socket), then ",
                  "http=HOST:PORT\n");
  return text;
}

bool IsLoopback(const HostPort& parts) {
  if (parts.host == "localhost" || parts.host == "[::1]") return true;
  in_addr address;
  return inet_pton(AF_INET, parts.node().c_str(), &address) == 1 &&
         (ntohl(address.s_addr) >> 24) == 127;
}

// `may_be_public`: the traffic is encrypted or need not be.
absl::Status CheckAddress(absl::string_view flag_name, const std::string& address,
                          bool may_be_public) {
  const std::optional<HostPort> parts = ParseHostPort(address);
  if (!parts || !parts->has_both()) {
    return Invalid(
        "--", flag_name, " is '", address,
        "'; it must be host:port, an IPv6 address in brackets, the port from 0 to 65535");
  }
  if (may_be_public || IsLoopback(*parts)) return absl::OkStatus();
  return Invalid("--", flag_name, " is '", address,
                 "', which is not loopback; plain text there needs --insecure");
}

absl::Status CheckGrpcAddress(const Options& options) {
  if (options.grpc.address.empty() && !options.grpc.unix_socket.empty()) return absl::OkStatus();
  const SecurityOptions& security = options.security;
  return CheckAddress("grpc_address", options.grpc.address,
                      security.insecure || !security.tls_cert.empty());
}

bool IsHostText(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || c == '.' || c == '-' || c == '_';
  });
}

absl::Status CheckHttpHosts(const std::string& hosts) {
  for (const absl::string_view item : absl::StrSplit(hosts, ',', absl::SkipEmpty())) {
    const bool has_empty_label = absl::StrContains(absl::StrCat(".", item, "."), "..");
    if (item == "*" || (IsHostText(absl::StripPrefix(item, "*.")) && !has_empty_label)) continue;
    return Invalid("--http_hosts has '", item,
                   "'; it must have names of hosts, without port or final dot, such as "
                   "rapt.example.org or *.example.org, or *");
  }
  return absl::OkStatus();
}

// Whether a browser sends this origin: a scheme and a host in lower case, and a port that is not
// the scheme's own.
bool IsOrigin(absl::string_view text) {
  const std::pair<absl::string_view, absl::string_view> parts =
      absl::StrSplit(text, absl::MaxSplits("://", 1));
  const auto& [scheme, authority] = parts;
  const std::optional<HostPort> host_port = ParseHostPort(authority);
  if (!host_port) return false;
  const auto& [host, port] = *host_port;
  return IsHostText(scheme) && (IsHostText(host) || absl::StartsWith(host, "[")) &&
         (port ? absl::StrCat(host, ":", *port) : host) == authority &&
         std::none_of(text.begin(), text.end(), absl::ascii_isupper) && port != 0 &&
         !(scheme == "http" && port == 80) && !(scheme == "https" && port == 443);
}

absl::Status CheckOrigins(const std::string& origins) {
  for (const absl::string_view origin : absl::StrSplit(origins, ',', absl::SkipEmpty())) {
    if (IsOrigin(origin)) continue;
    return Invalid("--http_allow_origin has '", origin,
                   "'; it must have origins as browsers send them, in lower case and without path "
                   "or default port, such as https://example.org or http://localhost:3000");
  }
  return absl::OkStatus();
}

absl::Status CheckHttpAddress(const Options& options) {
  if (options.http.address.empty()) return absl::OkStatus();
  const SecurityOptions& security = options.security;
  return CheckAddress("http_address", options.http.address,
                      security.insecure || !security.tls_cert.empty());
}

// Checks that the settings of certificates and tokens are consistent. Does not read the files.
absl::Status CheckSecurity(const Options& options) {
  const SecurityOptions& security = options.security;
  const bool has_cert = !security.tls_cert.empty();
  const bool has_address = !options.grpc.address.empty() || !options.http.address.empty();
  if (has_cert != !security.tls_key.empty()) {
    return Invalid("--tls_cert and --tls_key must be set together");
  }
  if (!has_cert && !security.tls_client_ca.empty()) {
    return Invalid("--tls_client_ca needs --tls_cert and --tls_key");
  }
  if (has_cert && !has_address) {
    return Invalid("--tls_cert needs --grpc_address or --http_address, which are empty");
  }
  if (has_address && !has_cert && !security.token_file.empty()) {
    return Invalid(
        "--token_file needs --tls_cert, or --unix_socket with an empty --grpc_address and an empty "
        "--http_address: tokens are not sent in plain text");
  }
  return absl::OkStatus();
}

absl::Status CheckCudnn(const CudnnOptions& cudnn) {
  if (cudnn.memory_bytes > 0 && cudnn.memory_bytes < kMinCudnnMemoryBytes) {
    return Invalid("--cudnn_memory_bytes is ", cudnn.memory_bytes, "; it must be 0 or at least ",
                   kMinCudnnMemoryBytes);
  }
  if (cudnn.memory_bytes > 0) return absl::OkStatus();
  if (!cudnn.warm_plans.empty()) {
    return Invalid("--cudnn_warm_plans needs --cudnn_memory_bytes or --backend=cudnn");
  }
  if (cudnn.kv_cache_bytes > 0) {
    return Invalid("--cudnn_kv_cache_bytes needs --cudnn_memory_bytes or --backend=cudnn");
  }
  return absl::OkStatus();
}

absl::Status CheckCache(const CacheOptions& cache) {
  constexpr int64_t kMinCacheBytes = int64_t{4} << 20;  // two slabs
  if (cache.bytes > 0 && cache.bytes < kMinCacheBytes) {
    return Invalid("--kv_cache_bytes is ", cache.bytes, "; it must be 0 or at least ",
                   kMinCacheBytes);
  }
  if (cache.default_lease > cache.max_lease) {
    return Invalid("--kv_default_lease is ", Show(cache.default_lease),
                   "; it must be at most --kv_max_lease, ", Show(cache.max_lease));
  }
  if (cache.instance_name.size() <= cache::kMaxInstanceBytes) return absl::OkStatus();
  return Invalid("--instance_name has ", cache.instance_name.size(), " bytes; at most ",
                 cache::kMaxInstanceBytes, " are allowed");
}

absl::Status Check(absl::Span<const Setting> settings, const Options& options) {
  absl::Status status = CheckGrpcAddress(options);
  status.Update(CheckHttpAddress(options));
  status.Update(CheckHttpHosts(options.http.hosts));
  status.Update(CheckOrigins(options.http.allow_origin));
  status.Update(CheckSecurity(options));
  status.Update(
      CheckAddress("metrics_address", options.metrics_address, options.security.insecure));
  for (const Setting& setting : settings) {
    status.Update(
        std::visit([&](auto* value) { return CheckRange(setting, *value); }, setting.value));
  }
  status.Update(CheckCache(options.cache));
  status.Update(CheckCudnn(options.cudnn));
  return status;
}

// One for each core. With a quota, a process whose compute threads use all of it would be throttled
// when the network threads run as well, so these are subtracted.
int64_t DefaultThreads(const HostLimits& host) {
  int64_t threads = std::clamp<int64_t>(host.cores, 1, kMaxThreads);
  if (!host.has_cpu_quota) return threads;
  while (threads > 1 && threads + WireThreads(threads) > host.cores) --threads;
  return threads;
}

// Replaces settings of 0 by values derived from the host and other settings.
void FillIn(const HostLimits& host, Options& options) {
  if (options.compute.threads == 0) options.compute.threads = DefaultThreads(host);
  if (options.admission.memory_budget_bytes == 0) {
    options.admission.memory_budget_bytes =
        static_cast<int64_t>(kMemoryShare * static_cast<double>(host.memory_bytes));
  }
  if (options.cudnn.memory_bytes == 0 && options.compute.backend == "cudnn") {
    options.cudnn.memory_bytes = kDefaultCudnnMemoryBytes;
  }
}

// Warns of settings that have no effect.
void CheckUse(Options& options) {
  if (options.http.hosts.empty() || options.security.tls_cert.empty()) return;
  options.warnings.emplace_back(
      "--http_hosts is ignored with --tls_cert; clients check the name against the certificate");
}

// The requests, resident keys and values, and what a GPU pins. Beyond the available memory, the
// system would end the process under load.
void CheckMemory(const HostLimits& host, Options& options) {
  const std::pair<const char*, int64_t> parts[] = {
      {"--memory_budget_bytes", options.admission.memory_budget_bytes},
      {"--kv_cache_bytes", options.cache.bytes},
      {"--cudnn_memory_bytes", options.cudnn.memory_bytes}};
  std::optional<int64_t> sum = 0;
  std::vector<std::string> named;
  for (const auto& [name, bytes] : parts) {
    sum = sum ? CheckedAdd(*sum, bytes) : std::nullopt;
    if (bytes > 0) named.push_back(absl::StrCat(name, "=", bytes));
  }
  if (host.memory_bytes == 0 || (sum && *sum <= host.memory_bytes)) return;
  options.warnings.push_back(absl::StrCat(absl::StrJoin(named, " and "),
                                          ": this machine or its cgroup has only ",
                                          host.memory_bytes, " bytes of memory"));
}

// Connections of --grpc_address, --unix_socket and --http_address get what others leave: those of
// the probes, which are always answered, new ones before they are counted, files and event loops.
absl::Status FitDescriptors(const HostLimits& host, Options& options) {
  constexpr int64_t kNewConnections = 64;  // of each address at once
  constexpr int64_t kFiles = 64;
  constexpr int64_t kFilesOfGpu = 256;
  constexpr int64_t kLeastConnections = 16;
  if (host.descriptors == 0) return absl::OkStatus();
  const int64_t addresses = int64_t{!options.grpc.address.empty()} +
                            int64_t{!options.grpc.unix_socket.empty()} +
                            int64_t{!options.http.address.empty()};
  const int64_t loops = 2 * WireThreads(options.compute.threads) + 1;
  const int64_t others = kProbeConnections + (addresses + 1) * kNewConnections + 2 * loops +
                         kFiles + (options.cudnn.memory_bytes > 0 ? kFilesOfGpu : 0);
  const int64_t most = (host.descriptors - others) / addresses;
  if (most < kLeastConnections) {
    return Invalid("the limit of open descriptors (ulimit -n) is ", host.descriptors,
                   "; it must be at least ", others + kLeastConnections * addresses);
  }
  if (options.grpc.max_connections <= most) return absl::OkStatus();
  options.warnings.push_back(absl::StrCat("--max_connections is ", options.grpc.max_connections,
                                          ", but the limit of open descriptors ", "(ulimit -n), ",
                                          host.descriptors, ", leaves ", most, " to each address; ",
                                          most, " is used"));
  options.grpc.max_connections = most;
  return absl::OkStatus();
}

}  // namespace

int WireThreads(int64_t compute_threads) {
  // On two cores, a single wire thread handles more small calls than two, because it wakes no
  // other; see docs/tuning.md.
  constexpr int64_t kComputeThreadsPerWireThread = 4;
  return static_cast<int>(std::max<int64_t>(1, compute_threads / kComputeThreadsPerWireThread));
}

absl::StatusOr<Options> ParseOptions(absl::Span<const char* const> arguments,
                                     Environment environment, const HostLimits& host) {
  Options options;
  const std::vector<Setting> settings = SettingsOf(options);
  CLI::App app;
  app.formatter_fn([](auto&&...) { return HelpText(); });
  app.set_help_flag("--help");
  app.set_version_flag("--version", absl::StrCat("rapt-server ", Version(), "\n"));
  AddFlag(app, "--flagfile", false);
  absl::Status status = SetFromEnvironment(settings, environment, options.warnings);
  const absl::StatusOr<std::string> text =
      SetFromArguments(settings, std::vector<std::string>(arguments.begin(), arguments.end()), app);
  status.Update(text.status());
  options.text_to_print = text.value_or("");
  if (!options.text_to_print.empty()) return options;
  if (!status.ok()) return status;
  FillIn(host, options);
  RAPT_RETURN_IF_ERROR(Check(settings, options));
  RAPT_RETURN_IF_ERROR(FitDescriptors(host, options));
  CheckMemory(host, options);
  CheckUse(options);
  return options;
}

}  // namespace rapt
