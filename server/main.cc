// rapt-server: reads the options, wires the parts, serves until a signal, drains.
#include <grpcpp/grpcpp.h>
#include <sys/resource.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"
#include "attention/attention.h"
#include "attention/backend.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/cudnn/cuda_device.h"
#include "attention/cudnn/cudnn_backend.h"
#include "base/buffer_pool.h"
#include "base/clock.h"
#include "base/host_limits.h"
#include "base/log.h"
#include "base/timer.h"
#include "base/version.h"
#include "server/admission/gate.h"
#include "server/calls/access.h"
#include "server/calls/open_calls.h"
#include "server/calls/slow_calls.h"
#include "server/calls/stream_counts.h"
#include "server/engine.h"
#include "server/execution/executor.h"
#include "server/housekeeper.h"
#include "server/metrics/http_endpoint.h"
#include "server/metrics/metrics.h"
#include "server/options.h"
#include "server/queue_state.h"
#include "server/readiness.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/grpc/grpc_server.h"
#include "server/wire/grpc/health.h"
#include "server/wire/grpc/listener.h"
#include "server/wire/grpc/oip/service.h"
#include "server/wire/grpc/rapt/service.h"
#include "server/wire/grpc/receive_quota.h"
#include "server/wire/grpc/tensor_call.h"
#include "server/wire/grpc/tensor_methods.h"
#include "server/wire/grpc/tls.h"

namespace rapt {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// The deadline of gRPC's own shutdown, which sends the last responses. Only open health watches,
// which never end on their own, make it wait that long.
constexpr std::chrono::milliseconds kFarewell{500};

// The wire gets a thread for so many that compute. One can do it without waking others, and takes
// more small calls than two do on two cores: docs/tuning.md.
constexpr int kCoresOfWireThread = 4;

// A budget that leaves less than this for a message serves nobody.
constexpr int64_t kLeastMaxMessageBytes = 64 * 1024;

// The largest message where none is set, as long as the budget has room for two of them.
constexpr int64_t kDefaultMaxMessageBytes = int64_t{256} << 20;

int Complain(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "rapt-server: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

// Whether SIGTERM or SIGINT has come, which are blocked.
bool HasStopSignal() {
  sigset_t pending;
  sigpending(&pending);
  return sigismember(&pending, SIGTERM) == 1 || sigismember(&pending, SIGINT) == 1;
}

std::string WithPort(const std::string& address, int port) {
  return absl::StrCat(address.substr(0, address.rfind(':') + 1), port);
}

// Blocks until SIGTERM or SIGINT; the next one ends the process at once.
int WaitForStopSignal(const sigset_t& stop_signals) {
  int signal_number = 0;
  sigwait(&stop_signals, &signal_number);
  pthread_sigmask(SIG_UNBLOCK, &stop_signals, nullptr);
  return signal_number;
}

// Blocks until the kernels of --cudnn_warm_plans are there, or a stop signal has come, which is
// still to be waited for: false.
bool WaitUntilWarm(const cudnn::CudnnBackend& device, const Clock& clock) {
  constexpr std::chrono::milliseconds kInterval{50};
  const Instant begin = clock.Now();
  cudnn::PlanCache::Counts warmth = device.warmth();
  if (warmth.ready + warmth.compiling + warmth.declined == 0) return true;
  for (; warmth.compiling > 0; warmth = device.warmth()) {
    if (HasStopSignal()) return false;
    std::this_thread::sleep_for(kInterval);
  }
  Log(LogLevel::kInfo, "kernels warm",
      {{"ready", warmth.ready},
       {"declined", warmth.declined},
       {"ms", std::chrono::duration_cast<std::chrono::milliseconds>(clock.Now() - begin).count()}});
  return true;
}

// Measures what decides between GPU and CPU under "auto", unless an option does. False where a stop
// signal has come, which is still to be waited for.
bool MeasureSpeeds(cudnn::CudnnBackend& device, int threads) {
  if (!device.measures()) return true;
  const absl::Status status = device.Measure(threads, [] { return !HasStopSignal(); });
  if (absl::IsCancelled(status)) return false;
  if (!status.ok()) {
    Log(LogLevel::kWarning, "the GPU's speed is not known", {{"reason", status.message()}});
  }
  return true;
}

// gRPC's locks are Abseil's. In Debian's build they look for deadlocks: each lock that is taken
// goes into a graph of all of them, under one lock.
void TuneLocks() { absl::SetMutexDeadlockDetectionMode(absl::OnDeadlockCycle::kIgnore); }

// What requests' memory belongs to. Never destroyed: gRPC may let go of the last slices, which give
// their bytes back here, after its server is gone.
struct Memory {
  explicit Memory(const Options& options)
      : timer(clock),
        gate({.budget_bytes = options.memory_budget_bytes,
              .max_queued = options.max_queued_requests,
              .max_queue_delay = options.max_queue_delay},
             timer, clock),
        pool(options.memory_budget_bytes / 2, clock) {}

  SteadyClock clock;
  Timer timer;
  AdmissionGate gate;
  BufferPool pool;
};

Memory& NewMemory(const Options& options) {
  static Memory* memory;  // where leak checkers find it
  return *(memory = new Memory(options));
}

// Whether calls were open or served since it was asked last.
std::function<bool()> HasBeenBusy(const OpenCalls& open_calls) {
  return [&open_calls, served_before = int64_t{0}]() mutable {
    const int64_t served = open_calls.served();
    return std::exchange(served_before, served) != served || open_calls.count() > 0;
  };
}

// The options with the largest message filled in. InvalidArgument where it is more than the budget
// has for messages.
absl::StatusOr<Options> SetMaxMessage(Options options, const AdmissionGate& gate) {
  const int64_t limit = gate.LimitOf(AdmissionGate::Share::kReceive);
  if (limit / 2 < kLeastMaxMessageBytes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--memory_budget_bytes is ", options.memory_budget_bytes, "; messages get ",
                     limit, " of it, and they need at least ", 2 * kLeastMaxMessageBytes));
  }
  if (options.max_message_bytes == 0) {
    options.max_message_bytes = static_cast<int>(std::min(kDefaultMaxMessageBytes, limit / 2));
  }
  if (options.max_message_bytes <= limit) return options;
  return absl::InvalidArgumentError(absl::StrCat(
      "--max_message_bytes is ", options.max_message_bytes, "; of --memory_budget_bytes=",
      options.memory_budget_bytes, ", ", limit, " are for messages"));
}

CallLimits LimitsOf(const Options& options) {
  return {.max_message_bytes = options.max_message_bytes,
          .min_receive_bytes_per_second = options.min_receive_bytes_per_second,
          .default_deadline = options.default_deadline,
          .max_deadline = options.max_deadline};
}

// Where clients find the server: "127.0.0.1:8001,unix:/run/rapt.sock".
std::string AddressesOf(const Options& options, int port) {
  std::vector<std::string> addresses;
  if (!options.grpc_address.empty()) addresses.push_back(WithPort(options.grpc_address, port));
  if (!options.unix_socket.empty()) addresses.push_back(absl::StrCat("unix:", options.unix_socket));
  return absl::StrJoin(addresses, ",");
}

// Those of the gRPC address. InvalidArgument where the files can't be used.
absl::StatusOr<std::shared_ptr<grpc::ServerCredentials>> CredentialsOf(const Options& options,
                                                                       const Clock& clock) {
  if (options.tls_cert.empty()) return grpc::InsecureServerCredentials();
  return TlsCredentials({options.tls_cert, options.tls_key, options.tls_client_ca}, clock);
}

// How calls to gRPC's address are secured: "plaintext", "tls", "mtls+tokens".
std::string SecurityOf(const Options& options) {
  std::string security = options.grpc_address.empty()    ? "unix"
                         : options.tls_cert.empty()      ? "plaintext"
                         : options.tls_client_ca.empty() ? "tls"
                                                         : "mtls";
  return options.token_file.empty() ? security : absl::StrCat(security, "+tokens");
}

GrpcSettings GrpcSettingsOf(const Options& options,
                            std::shared_ptr<grpc::ServerCredentials> credentials,
                            Listener* listener, const ReceiveQuota& quota) {
  return {.listener = listener,
          .credentials = std::move(credentials),
          .unix_socket = options.unix_socket,
          .unix_socket_mode = options.unix_socket_mode,
          .quota = quota,
          .max_streams_per_connection = options.max_streams_per_connection,
          .max_connection_idle = options.max_connection_idle,
          .max_connection_age = options.max_connection_age,
          .max_call_time = options.max_deadline,
          .reflection = options.reflection,
          .threads = std::max(1, options.threads / kCoresOfWireThread)};
}

// What the parts know of themselves, read at every scrape.
void ShowMemory(Metrics& metrics, const Memory& memory) {
  const AdmissionGate& gate = memory.gate;
  metrics.ShowGauge("rapt_memory_budget_bytes", "What all requests together may take.", {},
                    [&gate] { return static_cast<double>(gate.capacity_bytes()); });
  using Share = AdmissionGate::Share;
  for (const auto& [kind, share] :
       {std::pair("receive", Share::kReceive), std::pair("compute", Share::kCompute)}) {
    metrics.ShowGauge(
        "rapt_memory_reserved_bytes",
        "What they have taken: for messages that are received, for outputs and workspace.",
        {{"kind", kind}},
        [&gate, share = share] { return static_cast<double>(gate.reserved_bytes(share)); });
    metrics.ShowGauge("rapt_memory_limit_bytes", "How many of them large requests may take.",
                      {{"kind", kind}},
                      [&gate, share = share] { return static_cast<double>(gate.LimitOf(share)); });
  }
  metrics.ShowGauge("rapt_pool_idle_bytes", "Buffers kept to be used again.", {},
                    [&memory] { return static_cast<double>(memory.pool.idle_bytes()); });
}

// Without a device, `lanes` is null: nothing waits for it.
void ShowQueues(Metrics& metrics, const AdmissionGate& gate, const Executor& executor,
                const Executor* lanes) {
  const std::pair<const char*, std::function<QueueState()>> queues[] = {
      {"memory", [&gate] { return gate.waiting(); }},
      {"threads", [&executor] { return executor.waiting(); }},
      {"lanes", [lanes] { return lanes == nullptr ? QueueState{} : lanes->waiting(); }}};
  for (const auto& [name, read] : queues) {
    metrics.ShowGauge(
        "rapt_queue_depth", "Requests that wait, for memory, a thread, or a lane of the GPU.",
        {{"queue", name}}, [read = read] { return static_cast<double>(read().depth); });
    metrics.ShowGauge("rapt_queue_oldest_age_seconds", "How long the oldest of them has waited.",
                      {{"queue", name}}, [read = read] {
                        return std::chrono::duration<double>(read().oldest_age).count();
                      });
  }
  metrics.ShowGauge("rapt_compute_threads", "Compute threads.", {},
                    [&executor] { return static_cast<double>(executor.threads()); });
  metrics.ShowGauge("rapt_compute_threads_busy", "Compute threads that run tasks now.", {},
                    [&executor] { return static_cast<double>(executor.busy_threads()); });
}

// Zeros without a GPU.
void ShowDevice(Metrics& metrics, const cudnn::CudnnBackend& device) {
  using State = cudnn::CudnnBackend::State;
  const auto gauge = [&metrics, &device](const char* name, const char* help, auto read,
                                         Metrics::Labels labels = {}) {
    metrics.ShowGauge(name, help, std::move(labels),
                      [&device, read] { return static_cast<double>(read(device.state())); });
  };
  gauge("rapt_device_healthy", "1 while a GPU is there and has not just failed.",
        [](const State& s) { return s.healthy; });
  gauge("rapt_device_lanes", "Pieces of requests that the GPU may have at once.",
        [](const State& s) { return s.lanes; });
  gauge("rapt_device_lanes_busy", "Pieces of requests that it has.",
        [](const State& s) { return s.busy_lanes; });
  gauge("rapt_device_memory_bytes", "What was taken of its memory at the start.",
        [](const State& s) { return s.memory_bytes; });
  gauge("rapt_device_memory_used_bytes", "What the pieces need of it.",
        [](const State& s) { return s.used_memory_bytes; });
  const char* const plans_help = "Kernels that requests have asked for.";
  gauge("rapt_device_plans", plans_help, [](const State& s) { return s.plans.ready; },
        {{"state", "ready"}});
  gauge("rapt_device_plans", plans_help, [](const State& s) { return s.plans.compiling; },
        {{"state", "compiling"}});
  gauge("rapt_device_plans", plans_help, [](const State& s) { return s.plans.declined; },
        {{"state", "declined"}});
  for (size_t n = 0; n < cudnn::kFallbackReasons; ++n) {
    metrics.ShowCounter(
        "rapt_device_stand_in_pieces_total", "Pieces that the CPU computed in the GPU's place.",
        {{"reason", std::string(NameOf(static_cast<cudnn::FallbackReason>(n)))}},
        [&device, n] { return static_cast<double>(device.state().fallback_pieces[n]); });
  }
}

void ShowCalls(Metrics& metrics, const OpenCalls& open_calls, const StreamCounts& streams) {
  metrics.ShowGauge("rapt_open_calls", "Tensor calls that have no answer yet.", {},
                    [&open_calls] { return static_cast<double>(open_calls.count()); });
  metrics.ShowGauge("rapt_open_streams", "Calls of several messages that are open.", {},
                    [&streams] { return static_cast<double>(streams.open.load()); });
  metrics.ShowCounter("rapt_chunks_total", "Chunks that came in calls of several messages.", {},
                      [&streams] { return static_cast<double>(streams.chunks.load()); });
}

void ShowConnections(Metrics& metrics, const Listener& listener) {
  metrics.ShowGauge("rapt_open_connections", "Connections to gRPC's address.", {},
                    [&listener] { return static_cast<double>(listener.count()); });
  metrics.ShowCounter("rapt_refused_connections_total", "Those for which there was no place.", {},
                      [&listener] { return static_cast<double>(listener.refused()); });
}

// Where the limit of descriptors is a soft one, connections count on the hard one.
void TakeAllDescriptors() {
  rlimit limit;
  if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return;
  limit.rlim_cur = limit.rlim_max;
  setrlimit(RLIMIT_NOFILE, &limit);
}

// Null where only the Unix domain socket is asked for. Unavailable.
absl::StatusOr<std::unique_ptr<Listener>> ListenerFor(const Options& options) {
  if (options.grpc_address.empty()) return nullptr;
  return Listener::Bind(options.grpc_address, options.max_connections);
}

// Which build on which machine: always 1.
void ShowBuild(Metrics& metrics, const cudnn::CudnnBackend& device, const PlanOptions& options) {
  std::string isa;
  for (const Backend* backend : *options.backends) {
    if (isa.empty()) isa = ChooseIsa(*backend, options.isa);
  }
  const bool cudnn = device.Available().ok();
  metrics.ShowGauge(
      "rapt_build_info", "Version, instruction set of the CPU backend, cuDNN.",
      {{"version", std::string(Version())}, {"isa", isa}, {"cudnn", cudnn ? "yes" : "unavailable"}},
      [] { return 1.0; });
}

void AnnounceReady(const Options& options, const std::string& grpc_address,
                   const std::string& metrics_address) {
  Log(LogLevel::kInfo, "ready",
      {{"version", Version()},
       {"grpc", grpc_address},
       {"metrics", metrics_address},
       {"grpc_security", SecurityOf(options)},
       {"metrics_security", "plaintext"},
       {"backend", options.backend},
       {"isa", options.isa},
       {"threads", options.threads},
       {"memory_budget_bytes", options.memory_budget_bytes},
       {"max_message_bytes", options.max_message_bytes}});
  std::printf("rapt-server ready grpc=%s metrics=%s grpc_security=%s metrics_security=plaintext\n",
              grpc_address.c_str(), metrics_address.c_str(), SecurityOf(options).c_str());
  std::fflush(stdout);
}

// Stops accepting calls, waits for those in flight, then shuts the server down.
// REQUIRES: readiness has been withdrawn.
void Drain(const Options& options, Engine& engine, OpenCalls& open_calls, Listener* listener,
           GrpcServer& server) {
  std::this_thread::sleep_for(options.drain_pause);
  engine.StopAccepting();
  // Callers that get UNAVAILABLE retry elsewhere; few retry the CANCELLED that gRPC itself sends
  // once it shuts down.
  const auto refused_until = std::chrono::steady_clock::now() + options.drain_refusal_time;
  if (!open_calls.WaitUntilNone(options.grace_period)) {
    Log(LogLevel::kWarning, "grace period over", {{"open_calls", open_calls.count()}});
  }
  std::this_thread::sleep_until(refused_until);
  if (listener != nullptr) listener->Stop();
  server.Shutdown(std::chrono::system_clock::now() + kFarewell);
}

// Null where there is no device.
OpenCudaMemory OpenCudaMemoryOf(cudnn::Device* device) {
  if (device == nullptr) return nullptr;
  return [device](absl::string_view raw_handle, int64_t device_id, int64_t byte_size) {
    return device->OpenShared(raw_handle, device_id, byte_size);
  };
}

int Serve(const Options& asked, cudnn::CudnnBackend& device, const sigset_t& stop_signals) {
  Memory& memory = NewMemory(asked);
  const absl::StatusOr<Options> filled = SetMaxMessage(asked, memory.gate);
  if (!filled.ok()) return Complain(filled.status(), kExitUsage);
  const Options& options = *filled;
  const BackendSet backends({&device});
  const PlanOptions plan_options{.backend = options.backend,
                                 .isa = options.isa,
                                 .threads = options.threads,
                                 .backends = &backends};
  if (absl::Status status = Validate(plan_options); !status.ok()) {
    return Complain(status, kExitUsage);
  }
  // It watches the threads that compute; a device tells of itself.
  PlanOptions canary_options = plan_options;
  if (options.backend == device.name()) canary_options.backend = "auto";
  absl::StatusOr<Plan> canary = PlanCanary(canary_options);
  if (!canary.ok()) return Complain(canary.status(), kExitUsage);
  const auto credentials = CredentialsOf(options, memory.clock);
  if (!credentials.ok()) return Complain(credentials.status(), kExitUsage);
  const auto access = Access::Open(options.token_file, memory.clock);
  if (!access.ok()) return Complain(access.status(), kExitUsage);
  TakeOverGrpcLog();
  TakeAllDescriptors();

  Metrics metrics(backends);
  Executor executor(options.threads, memory.clock);
  std::unique_ptr<Executor> lanes;
  if (const int count = device.lanes(); count > 0) {
    lanes = std::make_unique<Executor>(count, memory.clock);
  }
  Engine engine(plan_options, memory.gate, memory.pool, executor, lanes.get());
  ReceiveQuota quota(memory.gate.LimitOf(AdmissionGate::Share::kReceive));
  OpenCalls open_calls({options.max_open_calls, options.max_calls_per_caller},
                       [&] { quota.Follow(open_calls); });
  const Housekeeper housekeeper(memory.pool, memory.clock, HasBeenBusy(open_calls));
  StreamCounts streams;
  Readiness readiness(*std::move(canary), options.stall_timeout, executor, memory.timer,
                      memory.clock);
  const auto is_ready = [&readiness] { return readiness.is_ready(); };
  ShowCalls(metrics, open_calls, streams);
  ShowQueues(metrics, memory.gate, executor, lanes.get());
  ShowMemory(metrics, memory);
  ShowDevice(metrics, device);
  ShowBuild(metrics, device, plan_options);
  metrics.ShowGauge("rapt_ready", "1 while it computes and new calls are welcome.", {},
                    [is_ready] { return is_ready() ? 1.0 : 0.0; });
  ShowProcess(metrics);
  SlowCalls slow_calls(options.slow_call, memory.clock);
  const auto observe = [&metrics, &slow_calls](absl::string_view method) -> CallObserver {
    return [&slow_calls, method = std::string(method),
            count = metrics.ForMethod(method)](const CallReport& report) {
      count(report);
      slow_calls.Note(method, report);
    };
  };
  const CallEnvironment environment{**access,     engine,       open_calls,       streams,
                                    memory.timer, memory.clock, LimitsOf(options)};
  SharedMemory shared_memory({.allowed = options.allow_shared_memory,
                              .key_prefix = options.shared_memory_prefix,
                              .open_cuda = OpenCudaMemoryOf(device.device())});
  TensorMethods tensor_methods;
  const std::unique_ptr<grpc::Service> oip_service =
      oip::NewService(environment, shared_memory, is_ready, observe, tensor_methods);
  const std::unique_ptr<grpc::Service> native_service =
      native::NewService(environment, shared_memory, observe, tensor_methods);
  Health health({oip::kServiceName, native::kServiceName}, tensor_methods);

  const auto listener = ListenerFor(options);
  if (!listener.ok()) return Complain(listener.status(), kExitFailure);
  if (*listener != nullptr) ShowConnections(metrics, **listener);
  const auto http = HttpEndpoint::Start(options.metrics_address, metrics, is_ready);
  if (!http.ok()) return Complain(http.status(), kExitFailure);
  const auto grpc_server =
      StartGrpc(GrpcSettingsOf(options, *credentials, listener->get(), quota), tensor_methods,
                {&health, oip_service.get(), native_service.get()});
  if (!grpc_server.ok()) return Complain(grpc_server.status(), kExitFailure);
  if (WaitUntilWarm(device, memory.clock) && MeasureSpeeds(device, options.threads)) {
    const absl::Status started =
        readiness.Start([&health](bool ready) { health.SetServing(ready); });
    if (!started.ok()) return Complain(started, kExitFailure);
    AnnounceReady(options, AddressesOf(options, *listener == nullptr ? 0 : (*listener)->port()),
                  WithPort(options.metrics_address, (*http)->port()));
  }
  const int signal_number = WaitForStopSignal(stop_signals);
  Log(LogLevel::kInfo, "draining",
      {{"signal", signal_number == SIGTERM ? "SIGTERM" : "SIGINT"},
       {"open_calls", open_calls.count()}});
  readiness.Withdraw();
  health.SetServing(false);
  Drain(options, engine, open_calls, listener->get(), **grpc_server);
  Log(LogLevel::kInfo, "stopped", {{"served_calls", open_calls.served()}});
  return EXIT_SUCCESS;
}

// Who is told to use the GPU does not ask whether it is worth the way.
std::optional<double> LeastFlops(const Options& options) {
  if (options.backend != "auto") return 0;
  return options.cudnn_min_flops;
}

// Before any other thread comes: what opening a GPU may do to a process is tried in a child.
// Cancelled where a stop signal came meanwhile.
absl::Status StartCudnn(const Options& options, const Clock& clock, cudnn::CudnnBackend& backend) {
  if (options.cudnn_memory_bytes == 0) return absl::OkStatus();
  absl::StatusOr<std::unique_ptr<cudnn::Device>> device = cudnn::OpenCudaDevice(
      {.libraries = options.cudnn_libraries, .memory_bytes = options.cudnn_memory_bytes});
  if (absl::IsCancelled(device.status())) return device.status();
  if (!device.ok() && options.backend == "auto") {
    Log(LogLevel::kWarning, "without a GPU", {{"reason", device.status().message()}});
  }
  backend.Start(std::move(device), CpuBackend(), clock,
                {.min_flops = LeastFlops(options), .plan_directory = options.cudnn_plan_cache});
  // Where there is no device, Serve() says so or does without.
  if (!backend.Available().ok()) return absl::OkStatus();
  const absl::Status warm = backend.Warm(options.cudnn_warm_plans);
  return absl::Status(warm.code(), absl::StrCat("--cudnn_warm_plans: ", warm.message()));
}

int Main(int argc, char** argv) {
  // Blocked before any thread starts, so that sigwait alone sees them.
  sigset_t stop_signals;
  sigemptyset(&stop_signals);
  for (int signal_number : {SIGTERM, SIGINT}) {
    std::signal(signal_number, SIG_DFL);
    sigaddset(&stop_signals, signal_number);
  }
  pthread_sigmask(SIG_BLOCK, &stop_signals, nullptr);
  std::signal(SIGPIPE, SIG_IGN);
  TuneMalloc();
  TuneLocks();

  const absl::StatusOr<Options> options = ParseOptions(
      std::vector<const char*>(argv + std::min(argc, 1), argv + argc),
      [](const char* name) -> const char* { return std::getenv(name); }, ReadHostLimits());
  if (!options.ok()) return Complain(options.status(), kExitUsage);
  if (!options->text_to_print.empty()) {
    std::fputs(options->text_to_print.c_str(), stdout);
    return EXIT_SUCCESS;
  }
  SetLogFormat(options->log_format);
  const SteadyClock clock;
  cudnn::CudnnBackend device;
  const absl::Status started = StartCudnn(*options, clock, device);
  if (absl::IsCancelled(started)) {
    Log(LogLevel::kInfo, "stopped", {{"reason", started.message()}});
    return EXIT_SUCCESS;
  }
  if (!started.ok()) return Complain(started, kExitUsage);
  return Serve(*options, device, stop_signals);
}

}  // namespace
}  // namespace rapt

int main(int argc, char** argv) { return rapt::Main(argc, argv); }
