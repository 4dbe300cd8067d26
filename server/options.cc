#include "server/options.h"

#include <arpa/inet.h>

#include <algorithm>
#include <fstream>
#include <limits>
#include <map>
#include <optional>
#include <utility>
#include <vector>

#include "absl/flags/commandlineflag.h"
#include "absl/flags/flag.h"
#include "absl/flags/reflection.h"
#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "absl/time/time.h"
#include "attention/problem_text.h"
#include "base/version.h"

ABSL_FLAG(std::string, grpc_address, "127.0.0.1:8001",
          "where to serve gRPC; port 0 takes a free one; empty: on --unix_socket alone");
ABSL_FLAG(
    std::string, unix_socket, "",
    "the path of a Unix domain socket to serve gRPC on as well, for clients at unix:PATH; with "
    "--grpc_address= there alone");
ABSL_FLAG(std::string, unix_socket_mode, "0600",
          "who may connect to it: the file's mode, in octal digits");
ABSL_FLAG(
    std::string, metrics_address, "127.0.0.1:8002",
    "where to serve /metrics, /healthz and /readyz over HTTP, an address of IPv4; port 0 takes "
    "a free one");
ABSL_FLAG(std::string, tls_cert, "",
          "the file of the certificate, and of those between it and the root, in PEM, with which "
          "--grpc_address speaks TLS; read again when it is replaced, as are the next three");
ABSL_FLAG(std::string, tls_key, "", "the file of its private key, in PEM without a passphrase");
ABSL_FLAG(std::string, tls_client_ca, "",
          "a file of authorities in PEM: callers have to show a certificate that one of them "
          "signed; empty: they need none");
ABSL_FLAG(std::string, token_file, "",
          "a file with a line NAME SHA256 for each bearer token, its hash in hexadecimal digits: "
          "callers have to send one of them, by TLS or --unix_socket; empty: they need none");
ABSL_FLAG(std::string, backend, "auto",
          "who computes: auto, cpu or reference, and cudnn in builds that have it; auto takes the "
          "first that can");
ABSL_FLAG(std::string, cudnn_libraries, "",
          "directories with the libraries of CUDA 13 and cuDNN 9, with ':' between them; empty: "
          "where the system looks");
ABSL_FLAG(
    int64_t, cudnn_memory_bytes, 0,
    "memory that cudnn takes of the GPU, and as much pinned on the host beside the budget; 0: "
    "4 GiB with --backend=cudnn, else none, and auto leaves the GPU alone");
ABSL_FLAG(
    std::optional<int64_t>, cudnn_min_flops, std::nullopt,
    "auto leaves problems of fewer operations than this to the cpu; empty: those that by what "
    "is measured at the start the cpu computes faster");
ABSL_FLAG(std::string, cudnn_plan_cache, "",
          "a directory where compiled kernels are kept for the next start; empty: none are");
ABSL_FLAG(std::string, cudnn_warm_plans, "",
          "shapes whose kernels, alone and in company, are compiled before the server is ready, "
          "apart by commas, as "
          "'1x32/8x4096x128 bf16 causal, 8x32/8x1:4096x128 bf16'");
ABSL_FLAG(
    std::string, isa, "auto",
    "the instruction set that the cpu backend uses: auto, amx, avx512, avx2 or portable; auto "
    "takes the first of these that the machine has");
ABSL_FLAG(int64_t, threads, 0, "compute threads, 1 to 1024; 0: as many as cores are given");
ABSL_FLAG(int64_t, memory_budget_bytes, 0,
          "what all requests together may take; 0: 60 % of the memory that is given");
ABSL_FLAG(int64_t, max_message_bytes, 0,
          "the largest message that is received, 1 to 2147483647; 0: 256 MiB, or half of what the "
          "memory budget has for messages if that is less");
ABSL_FLAG(int64_t, max_open_calls, 4096, "tensor calls that may be open at once");
ABSL_FLAG(int64_t, max_calls_per_caller, 1024,
          "tensor calls that one caller may have open at once: a token's holder, else who a "
          "certificate names, else an address");
ABSL_FLAG(int64_t, max_connections, 4096,
          "connections to --grpc_address that may be open at once; more are closed as they come");
ABSL_FLAG(int64_t, max_streams_per_connection, 1024,
          "calls that may be open on one connection; more wait at their caller");
ABSL_FLAG(absl::Duration, max_connection_idle, absl::Minutes(30),
          "connections that have had no call for so long are closed");
ABSL_FLAG(absl::Duration, max_connection_age, absl::ZeroDuration(),
          "older connections are closed once their calls are over; 0: none is");
ABSL_FLAG(bool, reflection, true, "tell callers by gRPC's reflection which services there are");
ABSL_FLAG(int64_t, max_queued_requests, 1024, "requests that may wait for memory; 0: none waits");
ABSL_FLAG(absl::Duration, max_queue_delay, absl::Seconds(10),
          "how long a request may wait for memory");
ABSL_FLAG(int64_t, min_receive_bytes_per_second, 1 << 20,
          "how fast messages have to be received, or they are given up: requests by the server, "
          "after 2 s of grace, and answers by their caller, after 20 s");
ABSL_FLAG(absl::Duration, default_deadline, absl::Seconds(60),
          "the deadline of calls that set none");
ABSL_FLAG(absl::Duration, max_deadline, absl::Hours(1),
          "the longest deadline that a call may have; later ones count as this");
ABSL_FLAG(absl::Duration, stall_timeout, absl::Seconds(10),
          "how long the compute threads may be without progress before the server is not ready");
ABSL_FLAG(absl::Duration, grace_period, absl::Seconds(20),
          "how long calls in flight may go on after SIGTERM or SIGINT");
ABSL_FLAG(absl::Duration, drain_pause, absl::Milliseconds(100),
          "how long new calls are still accepted after a stop signal, while readiness is already "
          "withdrawn, so that load balancers can react; 0: not at all");
ABSL_FLAG(absl::Duration, drain_refusal_time, absl::Milliseconds(200),
          "the minimum time after --drain_pause for which new calls are refused with UNAVAILABLE "
          "before the server stops listening");
ABSL_FLAG(std::string, log_format, "text", "how lines of the log are written: text or json");
ABSL_FLAG(absl::Duration, slow_call, absl::ZeroDuration(),
          "calls that take so long are logged, with shape, stages and plan; 0: none is");
ABSL_FLAG(bool, allow_shared_memory, false,
          "let callers on this machine keep tensors in POSIX shared memory that they register");
ABSL_FLAG(std::string, shared_memory_prefix, "rapt",
          "what the name of a shared memory object has to begin with; empty: any");
ABSL_FLAG(bool, insecure, false,
          "serve in plain text on addresses that are not loopback: metrics, and gRPC without "
          "--tls_cert");

namespace rapt {
namespace {

constexpr int64_t kMaxThreads = 1024;
constexpr int64_t kDefaultCudnnMemoryBytes = int64_t{4} << 30;
constexpr int64_t kLeastCudnnMemoryBytes = int64_t{64} << 20;
constexpr double kMemoryShare = 0.6;

// "grpc_address" is RAPT_GRPC_ADDRESS in the environment.
std::string VariableOf(absl::string_view flag_name) {
  return absl::StrCat("RAPT_", absl::AsciiStrToUpper(flag_name));
}

std::map<std::string, absl::CommandLineFlag*> FlagsByName() {
  std::map<std::string, absl::CommandLineFlag*> flags;
  for (const auto& [name, flag] : absl::GetAllFlags()) flags.emplace(name, flag);
  return flags;
}

absl::string_view KindOf(const absl::CommandLineFlag& flag) {
  if (flag.IsOfType<bool>()) return "true or false";
  if (flag.IsOfType<int64_t>()) return "a whole number";
  if (flag.IsOfType<absl::Duration>()) return "a duration such as 20s or 500ms";
  return "text";
}

// `source` is what the user wrote: "--threads" or "RAPT_THREADS".
absl::Status SetFlag(absl::CommandLineFlag& flag, absl::string_view source,
                     absl::string_view value) {
  std::string error;
  if (flag.ParseFrom(value, &error)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(source, " is '", value, "'; it must be ", KindOf(flag)));
}

// A variable that is set but empty counts as not set, as in `RAPT_ISA= rapt-server`.
absl::Status SetFlagsFromEnvironment(ReadEnvironment environment) {
  for (const auto& [name, flag] : FlagsByName()) {
    const std::string variable = VariableOf(name);
    const char* value = environment(variable.c_str());
    if (value == nullptr || *value == '\0') continue;
    absl::Status status = SetFlag(*flag, variable, value);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

// Sets the flag that arguments[index] names; moves `index` past it and past its value.
absl::Status SetFlagFromArgument(absl::Span<const std::string> arguments, size_t& index) {
  absl::string_view argument = arguments[index++];
  if (!absl::StartsWith(argument, "--") || argument.size() == 2) {
    return absl::InvalidArgumentError(
        absl::StrCat("unexpected argument '", argument, "'; --help lists the flags"));
  }
  argument.remove_prefix(2);
  const size_t equals = argument.find('=');
  const absl::string_view name = argument.substr(0, equals);
  absl::CommandLineFlag* flag = absl::FindCommandLineFlag(name);
  if (flag == nullptr) {
    return absl::InvalidArgumentError(
        absl::StrCat("there is no flag --", name, "; --help lists the flags"));
  }
  const std::string source = absl::StrCat("--", name);
  if (equals != absl::string_view::npos) return SetFlag(*flag, source, argument.substr(equals + 1));
  if (flag->IsOfType<bool>()) return SetFlag(*flag, source, "true");
  if (index == arguments.size()) {
    return absl::InvalidArgumentError(absl::StrCat(source, " needs a value"));
  }
  return SetFlag(*flag, source, arguments[index++]);
}

// The file's flags where --flagfile names one. Lines that are empty or begin with # say nothing.
absl::StatusOr<std::vector<std::string>> ReadFlagFile(const std::string& path) {
  std::ifstream file(path);
  std::vector<std::string> flags;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    const absl::string_view flag = absl::StripAsciiWhitespace(line);
    if (flag.empty() || flag.front() == '#') continue;
    if (!absl::StartsWith(flag, "--") || absl::StartsWith(flag, "--flagfile")) {
      return absl::InvalidArgumentError(absl::StrCat(
          "line ", number, " of --flagfile is no flag for it; a line is --flag=value"));
    }
    flags.emplace_back(flag);
  }
  if (file.eof()) return flags;
  return absl::InvalidArgumentError("the file of --flagfile can't be read");
}

// The arguments with the flags of files in the place of each --flagfile.
absl::StatusOr<std::vector<std::string>> WithFlagFiles(absl::Span<const char* const> arguments) {
  constexpr absl::string_view kFlag = "--flagfile";
  std::vector<std::string> all;
  for (size_t i = 0; i < arguments.size(); ++i) {
    absl::string_view argument = arguments[i];
    if (!absl::ConsumePrefix(&argument, kFlag) || (!argument.empty() && argument[0] != '=')) {
      all.emplace_back(arguments[i]);
      continue;
    }
    const bool has_value = absl::ConsumePrefix(&argument, "=");
    if (!has_value && ++i == arguments.size()) {
      return absl::InvalidArgumentError(absl::StrCat(kFlag, " needs a value"));
    }
    const auto flags = ReadFlagFile(has_value ? std::string(argument) : arguments[i]);
    if (!flags.ok()) return flags.status();
    all.insert(all.end(), flags->begin(), flags->end());
  }
  return all;
}

std::string HelpText() {
  std::string text =
      "Usage: rapt-server [--flag=value]...\n"
      "\n"
      "Computes attention for clients of the Open Inference Protocol over gRPC.\n"
      "\n";
  for (const auto& [name, flag] : FlagsByName()) {
    absl::StrAppend(&text, "  --", name, "=", flag->DefaultValue(), "\n      ", flag->Help(), "\n");
  }
  absl::StrAppend(&text, "\nThe environment sets the same, --grpc_address as RAPT_GRPC_ADDRESS; ",
                  "a flag wins over it.\n",
                  "--flagfile=FILE stands for the flags that are in the file, one a line.\n",
                  "When it serves, it prints: rapt-server ready grpc=HOST:PORT metrics=HOST:PORT\n",
                  "and how each is secured (grpc=HOST:PORT,unix:PATH with a socket)\n");
  return text;
}

struct HostAndPort {
  std::string host;
  int port;
};

std::optional<HostAndPort> SplitAddress(const std::string& address) {
  const size_t colon = address.rfind(':');
  if (colon == std::string::npos || colon == 0) return std::nullopt;
  int port;
  if (!absl::SimpleAtoi(address.substr(colon + 1), &port) || port < 0 || port > 65535) {
    return std::nullopt;
  }
  return HostAndPort{address.substr(0, colon), port};
}

bool IsLoopback(const std::string& host) {
  if (host == "localhost" || host == "[::1]") return true;
  in_addr address;
  return inet_pton(AF_INET, host.c_str(), &address) == 1 && (ntohl(address.s_addr) >> 24) == 127;
}

// `may_be_public`: what goes there is encrypted, or need not be.
absl::Status CheckAddress(absl::string_view flag_name, const std::string& address,
                          bool may_be_public) {
  const std::optional<HostAndPort> parts = SplitAddress(address);
  if (!parts) {
    return absl::InvalidArgumentError(absl::StrCat(
        "--", flag_name, " is '", address, "'; it must be host:port, the port from 0 to 65535"));
  }
  if (may_be_public || IsLoopback(parts->host)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag_name, " is '", address,
                   "', which is not loopback; plain text there needs --insecure"));
}

absl::Status CheckRange(absl::string_view flag_name, int64_t value, int64_t least, int64_t most) {
  if (value >= least && value <= most) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--", flag_name, " is ", value, "; it must be from ", least, " to ", most));
}

absl::Status CheckDuration(absl::string_view flag_name, absl::Duration value,
                           absl::Duration least) {
  if (value >= least && value <= absl::Hours(24)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("--", flag_name, " is ",
                                                 absl::FormatDuration(value), "; it must be from ",
                                                 absl::FormatDuration(least), " to 24h"));
}

// "0600": who may use a file.
std::optional<int> ParseMode(const std::string& text) {
  int mode = 0;
  for (const char digit : text) {
    if (digit < '0' || digit > '7') return std::nullopt;
    mode = mode * 8 + (digit - '0');
    if (mode > 0777) return std::nullopt;
  }
  if (text.empty()) return std::nullopt;
  return mode;
}

absl::Status CheckUnixSocketMode() {
  const std::string mode = absl::GetFlag(FLAGS_unix_socket_mode);
  if (ParseMode(mode)) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat(
      "--unix_socket_mode is '", mode, "'; it must be octal digits from 0 to 0777, such as 0660"));
}

std::optional<LogFormat> ParseLogFormat(const std::string& name) {
  if (name == "text") return LogFormat::kText;
  if (name == "json") return LogFormat::kJson;
  return std::nullopt;
}

absl::Status CheckLogFormat() {
  const std::string format = absl::GetFlag(FLAGS_log_format);
  if (ParseLogFormat(format)) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat("--log_format is '", format, "'; it must be text or json"));
}

absl::Status CheckGrpcAddress(bool insecure) {
  const std::string address = absl::GetFlag(FLAGS_grpc_address);
  const bool has_socket = !absl::GetFlag(FLAGS_unix_socket).empty();
  if (address.empty() && has_socket) return absl::OkStatus();
  return CheckAddress("grpc_address", address, insecure || !absl::GetFlag(FLAGS_tls_cert).empty());
}

// Which of the flags about certificates and tokens go together; what is in their files is not
// looked at.
absl::Status CheckSecurity() {
  const bool has_cert = !absl::GetFlag(FLAGS_tls_cert).empty();
  const bool has_address = !absl::GetFlag(FLAGS_grpc_address).empty();
  if (has_cert != !absl::GetFlag(FLAGS_tls_key).empty()) {
    return absl::InvalidArgumentError("--tls_cert and --tls_key need each other");
  }
  if (!has_cert && !absl::GetFlag(FLAGS_tls_client_ca).empty()) {
    return absl::InvalidArgumentError("--tls_client_ca needs --tls_cert and --tls_key");
  }
  if (has_cert && !has_address) {
    return absl::InvalidArgumentError("--tls_cert is for --grpc_address, which is empty");
  }
  if (has_address && !has_cert && !absl::GetFlag(FLAGS_token_file).empty()) {
    return absl::InvalidArgumentError(
        "--token_file needs --tls_cert, or --unix_socket with an empty --grpc_address: tokens "
        "never travel in plain text");
  }
  return absl::OkStatus();
}

absl::Status CheckCudnnMemory() {
  const int64_t bytes = absl::GetFlag(FLAGS_cudnn_memory_bytes);
  if (bytes == 0) return absl::OkStatus();
  return CheckRange("cudnn_memory_bytes", bytes, kLeastCudnnMemoryBytes,
                    std::numeric_limits<int64_t>::max());
}

int64_t CudnnMemoryBytes() {
  const int64_t bytes = absl::GetFlag(FLAGS_cudnn_memory_bytes);
  return bytes == 0 && absl::GetFlag(FLAGS_backend) == "cudnn" ? kDefaultCudnnMemoryBytes : bytes;
}

// Those of the flag, none where it is empty.
absl::StatusOr<std::vector<Problem>> CudnnWarmPlans() {
  const std::string text = absl::GetFlag(FLAGS_cudnn_warm_plans);
  if (text.empty()) return std::vector<Problem>();
  absl::StatusOr<std::vector<Problem>> problems = ParseProblems(text);
  if (problems.ok()) return problems;
  return absl::InvalidArgumentError(
      absl::StrCat("--cudnn_warm_plans: ", std::string(problems.status().message())));
}

absl::Status CheckCudnnWarmPlans() {
  const absl::StatusOr<std::vector<Problem>> problems = CudnnWarmPlans();
  if (!problems.ok()) return problems.status();
  if (problems->empty() || CudnnMemoryBytes() > 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      "--cudnn_warm_plans needs --cudnn_memory_bytes or --backend=cudnn");
}

absl::Status CheckFlags() {
  const bool insecure = absl::GetFlag(FLAGS_insecure);
  absl::Status status = CheckGrpcAddress(insecure);
  status.Update(CheckSecurity());
  status.Update(CheckUnixSocketMode());
  status.Update(CheckLogFormat());
  status.Update(CheckAddress("metrics_address", absl::GetFlag(FLAGS_metrics_address), insecure));
  status.Update(CheckRange("threads", absl::GetFlag(FLAGS_threads), 0, kMaxThreads));
  status.Update(CheckRange("memory_budget_bytes", absl::GetFlag(FLAGS_memory_budget_bytes), 0,
                           std::numeric_limits<int64_t>::max()));
  status.Update(CheckRange("max_message_bytes", absl::GetFlag(FLAGS_max_message_bytes), 0,
                           std::numeric_limits<int32_t>::max()));
  status.Update(CheckCudnnMemory());
  status.Update(CheckCudnnWarmPlans());
  status.Update(CheckRange("cudnn_min_flops", absl::GetFlag(FLAGS_cudnn_min_flops).value_or(0), 0,
                           std::numeric_limits<int64_t>::max()));
  constexpr int64_t kMostCalls = 1 << 20;
  status.Update(CheckRange("max_open_calls", absl::GetFlag(FLAGS_max_open_calls), 1, kMostCalls));
  status.Update(
      CheckRange("max_calls_per_caller", absl::GetFlag(FLAGS_max_calls_per_caller), 1, kMostCalls));
  status.Update(CheckRange("max_connections", absl::GetFlag(FLAGS_max_connections), 1, kMostCalls));
  status.Update(CheckRange("max_streams_per_connection",
                           absl::GetFlag(FLAGS_max_streams_per_connection), 1, kMostCalls));
  status.Update(
      CheckRange("max_queued_requests", absl::GetFlag(FLAGS_max_queued_requests), 0, kMostCalls));
  status.Update(CheckRange("min_receive_bytes_per_second",
                           absl::GetFlag(FLAGS_min_receive_bytes_per_second), 1,
                           std::numeric_limits<int32_t>::max()));
  constexpr absl::Duration kTick = absl::Milliseconds(1);
  status.Update(
      CheckDuration("stall_timeout", absl::GetFlag(FLAGS_stall_timeout), absl::Milliseconds(100)));
  status.Update(CheckDuration("grace_period", absl::GetFlag(FLAGS_grace_period), {}));
  status.Update(CheckDuration("drain_pause", absl::GetFlag(FLAGS_drain_pause), {}));
  status.Update(CheckDuration("drain_refusal_time", absl::GetFlag(FLAGS_drain_refusal_time), {}));
  status.Update(CheckDuration("slow_call", absl::GetFlag(FLAGS_slow_call), {}));
  status.Update(CheckDuration("max_queue_delay", absl::GetFlag(FLAGS_max_queue_delay), {}));
  status.Update(
      CheckDuration("max_connection_idle", absl::GetFlag(FLAGS_max_connection_idle), kTick));
  status.Update(CheckDuration("max_connection_age", absl::GetFlag(FLAGS_max_connection_age), {}));
  status.Update(CheckDuration("default_deadline", absl::GetFlag(FLAGS_default_deadline), kTick));
  status.Update(CheckDuration("max_deadline", absl::GetFlag(FLAGS_max_deadline), kTick));
  return status;
}

Options OptionsFromFlags(const HostLimits& host) {
  const int64_t threads = absl::GetFlag(FLAGS_threads);
  const int64_t memory_budget_bytes = absl::GetFlag(FLAGS_memory_budget_bytes);
  return {
      .grpc_address = absl::GetFlag(FLAGS_grpc_address),
      .unix_socket = absl::GetFlag(FLAGS_unix_socket),
      .unix_socket_mode = *ParseMode(absl::GetFlag(FLAGS_unix_socket_mode)),
      .metrics_address = absl::GetFlag(FLAGS_metrics_address),
      .tls_cert = absl::GetFlag(FLAGS_tls_cert),
      .tls_key = absl::GetFlag(FLAGS_tls_key),
      .tls_client_ca = absl::GetFlag(FLAGS_tls_client_ca),
      .token_file = absl::GetFlag(FLAGS_token_file),
      .backend = absl::GetFlag(FLAGS_backend),
      .isa = absl::GetFlag(FLAGS_isa),
      .threads =
          static_cast<int>(threads > 0 ? threads : std::clamp<int64_t>(host.cores, 1, kMaxThreads)),
      .memory_budget_bytes =
          memory_budget_bytes > 0
              ? memory_budget_bytes
              : static_cast<int64_t>(kMemoryShare * static_cast<double>(host.memory_bytes)),
      .max_message_bytes = static_cast<int>(absl::GetFlag(FLAGS_max_message_bytes)),
      .max_open_calls = absl::GetFlag(FLAGS_max_open_calls),
      .max_calls_per_caller = absl::GetFlag(FLAGS_max_calls_per_caller),
      .max_connections = absl::GetFlag(FLAGS_max_connections),
      .max_streams_per_connection =
          static_cast<int>(absl::GetFlag(FLAGS_max_streams_per_connection)),
      .max_connection_idle = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_max_connection_idle)),
      .max_connection_age = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_max_connection_age)),
      .reflection = absl::GetFlag(FLAGS_reflection),
      .max_queued_requests = absl::GetFlag(FLAGS_max_queued_requests),
      .min_receive_bytes_per_second = absl::GetFlag(FLAGS_min_receive_bytes_per_second),
      .max_queue_delay = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_max_queue_delay)),
      .default_deadline = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_default_deadline)),
      .max_deadline = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_max_deadline)),
      .stall_timeout = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_stall_timeout)),
      .grace_period = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_grace_period)),
      .drain_pause = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_drain_pause)),
      .drain_refusal_time = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_drain_refusal_time)),
      .log_format = *ParseLogFormat(absl::GetFlag(FLAGS_log_format)),
      .slow_call = absl::ToChronoMilliseconds(absl::GetFlag(FLAGS_slow_call)),
      .allow_shared_memory = absl::GetFlag(FLAGS_allow_shared_memory),
      .shared_memory_prefix = absl::GetFlag(FLAGS_shared_memory_prefix),
      .cudnn_libraries = absl::GetFlag(FLAGS_cudnn_libraries),
      .cudnn_memory_bytes = CudnnMemoryBytes(),
      .cudnn_min_flops = absl::GetFlag(FLAGS_cudnn_min_flops),
      .cudnn_plan_cache = absl::GetFlag(FLAGS_cudnn_plan_cache),
      .cudnn_warm_plans = *CudnnWarmPlans(),
      .text_to_print = "",
  };
}

Options OnlyPrint(std::string text) {
  Options options;
  options.text_to_print = std::move(text);
  return options;
}

}  // namespace

absl::StatusOr<Options> ParseOptions(absl::Span<const char* const> arguments,
                                     ReadEnvironment environment, const HostLimits& host) {
  for (const absl::string_view argument : arguments) {
    if (argument == "--help") return OnlyPrint(HelpText());
    if (argument == "--version") return OnlyPrint(absl::StrCat("rapt-server ", Version(), "\n"));
  }
  absl::Status status = SetFlagsFromEnvironment(environment);
  if (!status.ok()) return status;
  const absl::StatusOr<std::vector<std::string>> all = WithFlagFiles(arguments);
  if (!all.ok()) return all.status();
  for (size_t index = 0; index < all->size();) {
    status = SetFlagFromArgument(*all, index);
    if (!status.ok()) return status;
  }
  status = CheckFlags();
  if (!status.ok()) return status;
  return OptionsFromFlags(host);
}

}  // namespace rapt
