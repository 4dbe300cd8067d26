// Every knob of rapt-server. A knob is set by a flag, --grpc_address=..., on the command line or in
// a file that --flagfile names, or by the environment, RAPT_GRPC_ADDRESS=...; the flag wins.
#ifndef RAPT_SERVER_OPTIONS_H_
#define RAPT_SERVER_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/problem.h"
#include "base/host_limits.h"
#include "base/log.h"

namespace rapt {

struct Options {
  std::string grpc_address;     // "host:port"; port 0 takes a free one; empty: unix_socket alone
  std::string unix_socket;      // a path; empty: none
  int unix_socket_mode = 0;     // of the file there
  std::string metrics_address;  // likewise
  std::string tls_cert;         // paths, of PEM; empty: gRPC in plain text
  std::string tls_key;
  std::string tls_client_ca;  // empty: callers need no certificate
  std::string token_file;     // a path; empty: callers need no token
  std::string backend;        // auto, or a backend's name; not checked here
  std::string isa;            // auto, or an instruction set's name; not checked here
  int threads = 1;            // compute threads, 1 to 1024
  int64_t memory_budget_bytes = 0;
  int max_message_bytes = 0;  // 0: as much as the budget allows, 256 MiB at most
  int64_t max_open_calls = 0;
  int64_t max_calls_per_caller = 0;
  int64_t max_connections = 0;  // by TCP
  int max_streams_per_connection = 0;
  std::chrono::milliseconds max_connection_idle{0};
  std::chrono::milliseconds max_connection_age{0};  // 0: any
  bool reflection = true;
  int64_t max_queued_requests = 0;
  int64_t min_receive_bytes_per_second = 0;
  std::chrono::milliseconds max_queue_delay{0};
  std::chrono::milliseconds default_deadline{0};  // of calls that set none
  std::chrono::milliseconds max_deadline{0};
  std::chrono::milliseconds stall_timeout{0};       // without progress, then it is not ready
  std::chrono::milliseconds grace_period{0};        // for calls in flight after SIGTERM
  std::chrono::milliseconds drain_pause{0};         // from "not ready" until new calls are refused
  std::chrono::milliseconds drain_refusal_time{0};  // how long new calls are refused at least
  LogFormat log_format = LogFormat::kText;
  std::chrono::milliseconds slow_call{0};  // calls that take so long are logged; 0: none is
  bool allow_shared_memory = false;
  std::string shared_memory_prefix;  // of the objects' names; empty: any
  std::string cudnn_libraries;       // directories that ':' parts; empty: where the system looks
  int64_t cudnn_memory_bytes = 0;    // of the device; 0: none is opened
  std::optional<int64_t> cudnn_min_flops;  // fewer are the CPU's under auto; absent: measured
  std::string cudnn_plan_cache;            // a directory; empty: none
  std::vector<Problem> cudnn_warm_plans;   // whose kernels are there before it is ready

  // What --help or --version asks to print, instead of serving.
  std::string text_to_print;
};

// A variable of the environment, or null; std::getenv's shape.
using ReadEnvironment = absl::FunctionRef<const char*(const char* name)>;

// `arguments` are main's, without the program's name. InvalidArgument, in one line that names the
// flag or the variable, for an unknown flag, a bad value, a stray argument, or flags that don't go
// together. Everything is checked here that can be without touching anything but a flag file. Call
// it once: flags keep their values.
absl::StatusOr<Options> ParseOptions(absl::Span<const char* const> arguments,
                                     ReadEnvironment environment, const HostLimits& host);

}  // namespace rapt

#endif  // RAPT_SERVER_OPTIONS_H_
