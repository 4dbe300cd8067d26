// The settings of rapt-server. A setting comes from a flag, --grpc_address=..., on the command line
// or in a file that --flagfile names, or from the environment, RAPT_GRPC_ADDRESS=...; the flag
// takes precedence. The table in options.cc has a row for each.
#ifndef RAPT_SERVER_OPTIONS_H_
#define RAPT_SERVER_OPTIONS_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/problem.h"
#include "base/host_limits.h"
#include "base/log.h"

namespace rapt {

// The permission bits of a file, written in octal digits.
struct FileMode {
  int bits = 0;
};

struct GrpcOptions {
  std::string address = "127.0.0.1:8001";  // "host:port", port 0: a free one; empty: none
  std::string unix_socket;                 // a path; empty: none
  FileMode unix_socket_mode{0600};
  int64_t max_connections = 4096;           // by TCP
  int64_t max_connections_per_address = 0;  // 0: a quarter of max_connections
  int64_t max_streams_per_connection = 1024;
  std::chrono::milliseconds max_connection_idle = std::chrono::minutes(30);
  std::chrono::milliseconds max_connection_age{0};  // 0: unlimited
  bool reflection = true;
};

struct HttpOptions {
  std::string address = "127.0.0.1:8000";  // "host:port", port 0: a free one; empty: none
  int64_t max_json_bytes = int64_t{8} << 20;
  std::string hosts;         // separated by commas
  std::string allow_origin;  // separated by commas; empty: none
  bool explorer = true;
};

// The files are paths; empty: TLS, client certificates or tokens are not used.
struct SecurityOptions {
  std::string tls_cert;
  std::string tls_key;
  std::string tls_client_ca;
  std::string token_file;
  bool insecure = false;
};

struct ComputeOptions {
  std::string backend = "auto";  // auto, or a backend's name; not checked here
  std::string isa = "auto";      // auto, or an instruction set's name; not checked here
  int64_t threads = 0;           // set from the host if the setting is 0
  std::chrono::milliseconds stall_timeout = std::chrono::seconds(10);
};

struct AdmissionOptions {
  int64_t memory_budget_bytes = 0;  // set from the host if the setting is 0
  int64_t max_queued_requests = 1024;
  std::chrono::milliseconds max_queue_delay = std::chrono::seconds(10);
};

struct CallOptions {
  int64_t max_message_bytes = 0;  // 0: as much as the budget allows, 256 MiB at most
  int64_t max_open_calls = 4096;
  int64_t max_calls_per_caller = 1024;
  int64_t min_receive_bytes_per_second = 1 << 20;
  std::chrono::milliseconds default_deadline = std::chrono::seconds(60);
  std::chrono::milliseconds max_deadline = std::chrono::hours(1);
};

struct DrainOptions {
  std::chrono::milliseconds pause{100};         // from "not ready" until new calls are refused
  std::chrono::milliseconds refusal_time{200};  // the minimum time for which they are refused
  std::chrono::milliseconds grace_period = std::chrono::seconds(20);  // for calls in flight
};

struct LogOptions {
  LogFormat format = LogFormat::kText;
  std::chrono::milliseconds slow_call{0};  // 0: slow calls are not logged
};

struct CacheOptions {
  int64_t bytes = 0;  // of resident keys and values; 0: none are kept
  int64_t max_caches_per_caller = 65536;
  int64_t max_bytes_per_caller = 0;  // 0: no limit
  std::chrono::milliseconds default_lease = std::chrono::minutes(10);
  std::chrono::milliseconds max_lease = std::chrono::hours(24);
  std::string instance_name;  // empty: from the host and the address
};

struct SharedMemoryOptions {
  bool allowed = false;
  std::string prefix = "rapt";  // of the objects' names; empty: any
};

struct CudnnOptions {
  std::string libraries;             // directories separated by ':'; empty: the system's
  int64_t memory_bytes = 0;          // of the device; 0: no device is opened
  int64_t kv_cache_bytes = 0;        // of the device, in addition, for copies of pages; 0: none
  std::optional<int64_t> min_flops;  // absent: measured
  std::string plan_cache;            // a directory; empty: none
  std::vector<Problem> warm_plans;   // their kernels are compiled before the server is ready
};

struct Options {
  GrpcOptions grpc;
  HttpOptions http;
  std::string metrics_address = "127.0.0.1:8002";
  SecurityOptions security;
  ComputeOptions compute;
  AdmissionOptions admission;
  CallOptions calls;
  DrainOptions drain;
  LogOptions log;
  std::string model_repository;  // a folder; empty: none
  CacheOptions cache;
  SharedMemoryOptions shared_memory;
  CudnnOptions cudnn;

  // What the user should know but need not mend, one line each.
  std::vector<std::string> warnings;

  // The text of --help or --version, printed instead of serving.
  std::string text_to_print;
};

// Returns the number of threads that serve the network beside this many compute threads.
int WireThreads(int64_t compute_threads);

// Connections of --metrics_address that may be open at once.
inline constexpr int64_t kProbeConnections = 128;

// Entries "NAME=value", as in environ.
using Environment = absl::Span<const char* const>;

// `arguments` are main's without the program's name. Returns InvalidArgument, in one line that
// names the flag or the variable, for an unknown flag, a bad value, a stray argument, or flags that
// contradict each other; and for a host with too few descriptors. Reads no files other than those
// of --flagfile.
absl::StatusOr<Options> ParseOptions(absl::Span<const char* const> arguments,
                                     Environment environment, const HostLimits& host);

}  // namespace rapt

#endif  // RAPT_SERVER_OPTIONS_H_
