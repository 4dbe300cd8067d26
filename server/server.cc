#include "server/server.h"

#include <google/protobuf/stubs/logging.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <functional>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "attention/attention.h"
#include "attention/backend.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/cudnn/cuda_device.h"
#include "attention/cudnn/cudnn_backend.h"
#include "base/buffer_pool.h"
#include "base/clock.h"
#include "base/host_port.h"
#include "base/invalid.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/timer.h"
#include "base/version.h"
#include "server/admission/gate.h"
#include "server/cache/arena.h"
#include "server/cache/cache_store.h"
#include "server/cache/limits.h"
#include "server/cache/sequences.h"
#include "server/calls/access.h"
#include "server/calls/open_calls.h"
#include "server/calls/per_model.h"
#include "server/calls/slow_calls.h"
#include "server/calls/stream_counts.h"
#include "server/engine.h"
#include "server/execution/executor.h"
#include "server/housekeeper.h"
#include "server/metrics/metrics.h"
#include "server/metrics/process.h"
#include "server/models/model_repository.h"
#include "server/queue_state.h"
#include "server/readiness.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/connection_counts.h"
#include "server/wire/health_status.h"
#include "server/wire/health_watch.h"
#include "server/wire/http/pages.h"
#include "server/wire/http/router.h"
#include "server/wire/http/server.h"
#include "server/wire/http2/http2_server.h"
#include "server/wire/json_threads.h"
#include "server/wire/message_stream.h"
#include "server/wire/oip/methods.h"
#include "server/wire/oip/rest_methods.h"
#include "server/wire/rapt/cache_methods.h"
#include "server/wire/rapt/methods.h"
#include "server/wire/rapt/rest_methods.h"
#include "server/wire/reflection.h"
#include "server/wire/tls_files.h"
#include "server/wire/tls_socket.h"
#include "server/wire/unary_method.h"

namespace rapt {
namespace {

// Limit of the transport's shutdown, which sends the last responses. Only open health watches,
// which never end on their own, make it take that long.
constexpr std::chrono::milliseconds kTransportShutdownTime{500};
// A drain ends once no call has used a cache for this long.
constexpr std::chrono::seconds kCacheQuietTime{5};

// The memory budget must allow messages of this size.
constexpr int64_t kMinMessageLimitBytes = 64 * 1024;

// The default message limit, if the budget has room for two such messages.
constexpr int64_t kDefaultMaxMessageBytes = int64_t{256} << 20;

// The memory of requests.
struct Memory {
  explicit Memory(const AdmissionOptions& options)
      : timer(clock),
        gate({.budget_bytes = options.memory_budget_bytes,
              .max_queued = options.max_queued_requests,
              .max_queue_delay = options.max_queue_delay},
             timer, clock),
        pool(options.memory_budget_bytes, clock) {}

  SteadyClock clock;
  Timer timer;
  AdmissionGate gate;
  BufferPool pool;
};

// The cuDNN backend, with a device or without, and the set that it belongs to.
struct Backends {
  SteadyClock clock;
  cudnn::CudnnBackend cudnn;
  const BackendSet set{{&cudnn}};
};

// Opens the device if the options request one, and starts to compile its kernels. A missing device
// is an error only if --backend names it; Validate() reports it. Returns Cancelled after a stop
// signal. REQUIRES: the process has one thread: opening a GPU is first tried in a child process.
absl::Status StartCudnn(const Options& options, Backends& backends) {
  if (options.cudnn.memory_bytes == 0) return absl::OkStatus();
  const bool is_auto = options.compute.backend == "auto";
  absl::StatusOr<std::unique_ptr<cudnn::Device>> device =
      cudnn::OpenCudaDevice({.libraries = options.cudnn.libraries,
                             .memory_bytes = options.cudnn.memory_bytes,
                             .page_memory_bytes = options.cudnn.kv_cache_bytes});
  if (absl::IsCancelled(device.status())) return device.status();
  if (!device.ok() && is_auto) {
    Log(LogLevel::kWarning, "no GPU available", {{"reason", device.status().message()}});
  }
  // The offload threshold is for "auto" only.
  std::optional<double> min_flops = 0;
  if (is_auto) min_flops = options.cudnn.min_flops;
  backends.cudnn.Start(std::move(device), CpuBackend(), backends.clock,
                       {.min_flops = min_flops, .plan_directory = options.cudnn.plan_cache});
  if (!backends.cudnn.Available().ok()) return absl::OkStatus();
  const absl::Status warm = backends.cudnn.Warm(options.cudnn.warm_plans);
  return absl::Status(warm.code(), absl::StrCat("--cudnn_warm_plans: ", warm.message()));
}

// Fills in the message limit. InvalidArgument if it exceeds the budget's share for messages.
absl::Status SetMaxMessage(const AdmissionGate& gate, Options& options) {
  const int64_t limit = gate.LimitOf(AdmissionGate::Share::kReceive);
  const int64_t budget = options.admission.memory_budget_bytes;
  if (limit / 2 < kMinMessageLimitBytes) {
    return Invalid("--memory_budget_bytes is ", budget, "; its share for messages is ", limit,
                   " bytes and must be at least ", 2 * kMinMessageLimitBytes);
  }
  int64_t& max_message_bytes = options.calls.max_message_bytes;
  if (max_message_bytes == 0) max_message_bytes = std::min(kDefaultMaxMessageBytes, limit / 2);
  if (max_message_bytes <= limit) return absl::OkStatus();
  return Invalid("--max_message_bytes is ", max_message_bytes, "; it must be at most ", limit,
                 ", the share of --memory_budget_bytes=", budget, " for messages");
}

// For the gRPC address; null without TLS. InvalidArgument if the files can't be used.
absl::StatusOr<std::unique_ptr<TlsAcceptor>> TlsOf(const SecurityOptions& options,
                                                   const Clock& clock) {
  if (options.tls_cert.empty()) return nullptr;
  return TlsAcceptor::Load({options.tls_cert, options.tls_key, options.tls_client_ca}, clock);
}

// The memory of resident keys and values, and the caches in it.
struct Caches {
  Caches(const CacheOptions& options, const Clock& clock)
      : arena(options.bytes),
        store({.instance = options.instance_name,
               .max_caches_per_caller = options.max_caches_per_caller,
               .max_bytes_per_caller = options.max_bytes_per_caller,
               .default_lease = options.default_lease,
               .max_lease = options.max_lease},
              arena, clock),
        sequences(store) {}

  // Null without --kv_cache_bytes: none are made.
  cache::CacheStore* StoreOrNull() { return arena.capacity_bytes() > 0 ? &store : nullptr; }
  cache::Sequences* SequencesOrNull() { return arena.capacity_bytes() > 0 ? &sequences : nullptr; }

  cache::Arena arena;
  cache::CacheStore store;
  cache::Sequences sequences;
};

std::string HostName() {
  char host[256] = "";
  gethostname(host, sizeof(host) - 1);
  return host;
}

// "host/127.0.0.1:8001", cut to the length that ids allow.
std::string DefaultInstance(const std::string& address) {
  const std::string host = HostName();
  const size_t most = cache::kMaxInstanceBytes;
  const std::string suffix = absl::StrCat("/", address).substr(0, most);
  return absl::StrCat(absl::string_view(host).substr(0, most - suffix.size()), suffix);
}

// Null without a device.
OpenCudaMemory OpenCudaMemoryOf(cudnn::Device* device) {
  if (device == nullptr) return nullptr;
  return [device](absl::string_view raw_handle, int64_t device_id, int64_t byte_size) {
    return device->OpenShared(raw_handle, device_id, byte_size);
  };
}

// Returns a function that reports whether calls were open or served since its previous call.
std::function<bool()> HasBeenBusy(const OpenCalls& open_calls) {
  return [&open_calls, served_before = int64_t{0}]() mutable {
    const int64_t served = open_calls.served();
    return std::exchange(served_before, served) != served || open_calls.count() > 0;
  };
}

CallLimits LimitsOf(const CallOptions& options) {
  return {.max_message_bytes = options.max_message_bytes,
          .min_receive_bytes_per_second = options.min_receive_bytes_per_second,
          .default_deadline = options.default_deadline,
          .max_deadline = options.max_deadline};
}

http::Serve ServeBy(http::Router router) {
  return [router = std::make_shared<const http::Router>(std::move(router))](
             const http::Request& request) { return router->Find(request); };
}

std::vector<std::string> ItemsOf(const std::string& list) {
  return absl::StrSplit(list, ',', absl::SkipEmpty());
}

// Names of --http_address. With TLS, clients check the name against the certificate.
std::optional<http::HostNames> HostNamesOf(const Options& options) {
  if (!options.security.tls_cert.empty()) return std::nullopt;
  std::vector<std::string> names = ItemsOf(options.http.hosts);
  names.push_back(HostName());
  return http::HostNames(std::move(names));
}

std::string WithPort(const std::string& address, int port) {
  return absl::StrCat(ParseHostPort(address)->host, ":", port);
}

// Everything that is checked before the server is built.
struct Configuration {
  Options options;
  std::unique_ptr<Backends> backends;
  std::unique_ptr<Memory> memory;
  PlanOptions plan_options;
  Plan canary;
  std::unique_ptr<TlsAcceptor> tls;
  std::unique_ptr<Access> access;
};

absl::StatusOr<Configuration> Configure(Options options) {
  auto backends = std::make_unique<Backends>();
  RAPT_RETURN_IF_ERROR(StartCudnn(options, *backends));
  auto memory = std::make_unique<Memory>(options.admission);
  RAPT_RETURN_IF_ERROR(SetMaxMessage(memory->gate, options));
  PlanOptions plan_options{.backend = options.compute.backend,
                           .isa = options.compute.isa,
                           .threads = static_cast<int>(options.compute.threads),
                           .backends = &backends->set};
  RAPT_RETURN_IF_ERROR(Validate(plan_options));
  // The canary watches the compute threads; a device has health checks of its own.
  PlanOptions canary_options = plan_options;
  if (options.compute.backend == backends->cudnn.name()) canary_options.backend = "auto";
  RAPT_ASSIGN_OR_RETURN(Plan canary, PlanCanary(canary_options));
  RAPT_ASSIGN_OR_RETURN(auto tls, TlsOf(options.security, memory->clock));
  RAPT_ASSIGN_OR_RETURN(auto access, Access::Open(options.security.token_file, memory->clock));
  return Configuration{std::move(options),      std::move(backends), std::move(memory),
                       std::move(plan_options), std::move(canary),   std::move(tls),
                       std::move(access)};
}

class ServerImpl final : public Server {
 public:
  explicit ServerImpl(Configuration configuration);
  ~ServerImpl() override;

  absl::Status Start(absl::FunctionRef<bool()> stop_requested) override;
  void Drain() override;

  std::string grpc_address() const override;
  std::string metrics_address() const override {
    return WithPort(options_.metrics_address, probes_->port());
  }
  std::string http_address() const override {
    return rest_ == nullptr ? "" : WithPort(options_.http.address, rest_->port());
  }
  std::string security() const override;
  int64_t open_calls() const override { return open_calls_.count(); }
  void ReloadFiles() override;

 private:
  void ExportMetrics();
  void ExportBuild();
  std::chrono::duration<double> OldestRequestAge() const;
  CallObserver Observe(absl::string_view method);
  absl::Status Listen();
  absl::Status ServeRest();
  absl::Status ServeProbes();
  void PostToWire(absl::AnyInvocable<void()> run);
  absl::Status WaitUntilWarm(absl::FunctionRef<bool()> stop_requested) const;
  absl::Status MeasureSpeeds(absl::FunctionRef<bool()> stop_requested);
  void LogReady() const;
  void WaitForCaches(Instant end) const;

  const Options options_;
  const std::unique_ptr<Backends> backends_;
  const std::unique_ptr<Memory> memory_;
  const PlanOptions plan_options_;
  const std::unique_ptr<TlsAcceptor> tls_;  // null without TLS
  const std::unique_ptr<Access> access_;

  Metrics metrics_;
  Executor executor_;
  const std::unique_ptr<Executor> lanes_;  // null without a device
  Engine engine_;
  OpenCalls open_calls_;
  OpenCalls small_calls_;
  Caches caches_;
  const Housekeeper housekeeper_;
  StreamCounts streams_;
  Readiness readiness_;
  SlowCalls slow_calls_;
  const CallEnvironment environment_;
  const std::unique_ptr<ModelRepository> repository_;  // null without --model_repository
  SharedMemory shared_memory_;
  oip::Methods oip_methods_;
  native::Methods native_methods_;
  native::CacheMethods cache_methods_;
  HealthStatus health_status_;
  UnaryMethods methods_;
  StreamMethods stream_methods_;
  std::unique_ptr<Reflection> reflection_;  // null if it is turned off

  JsonThreads json_threads_;
  const oip::JsonInference json_inference_;
  const http::CallServices http_services_;

  // Set by Start(). The probes read the metrics of the other servers.
  std::unique_ptr<Http2Server> http2_server_;
  std::unique_ptr<http::Server> rest_;  // null: not served
  std::unique_ptr<http::Server> probes_;
};

std::unique_ptr<Executor> LanesOf(const cudnn::CudnnBackend& backend, const Clock& clock) {
  if (backend.lanes() == 0) return nullptr;
  return std::make_unique<Executor>(backend.lanes(), clock);
}

std::unique_ptr<ModelRepository> RepositoryOf(const Options& options, AdmissionGate& gate) {
  if (options.model_repository.empty()) return nullptr;
  std::vector<std::string> reserved = {kOtherModels};
  for (const ModelId& model : BuiltInModels()) reserved.emplace_back(model.name());
  return std::make_unique<ModelRepository>(
      ModelRepository::Options{.folder = options.model_repository,
                               .reserved = std::move(reserved),
                               .threads = static_cast<int>(options.compute.threads)},
      gate);
}

ServerImpl::ServerImpl(Configuration c)
    : options_(std::move(c.options)),
      backends_(std::move(c.backends)),
      memory_(std::move(c.memory)),
      plan_options_(std::move(c.plan_options)),
      tls_(std::move(c.tls)),
      access_(std::move(c.access)),
      metrics_(backends_->set),
      executor_(plan_options_.threads, memory_->clock),
      lanes_(LanesOf(backends_->cudnn, memory_->clock)),
      engine_(plan_options_, memory_->gate, memory_->pool, executor_, lanes_.get()),
      open_calls_({options_.calls.max_open_calls, options_.calls.max_calls_per_caller}),
      small_calls_({options_.calls.max_open_calls, options_.calls.max_calls_per_caller}),
      caches_(options_.cache, memory_->clock),
      housekeeper_(memory_->pool, memory_->clock, HasBeenBusy(open_calls_),
                   [this] { caches_.store.Expire(); }),
      readiness_(
          std::move(c.canary), options_.compute.stall_timeout,
          [this](absl::AnyInvocable<void()> run) { PostToWire(std::move(run)); }, executor_,
          memory_->timer, memory_->clock),
      slow_calls_(options_.log.slow_call, memory_->clock),
      environment_{*access_, engine_,        open_calls_,    small_calls_,
                   streams_, memory_->timer, memory_->clock, LimitsOf(options_.calls)},
      repository_(RepositoryOf(options_, memory_->gate)),
      shared_memory_({.allowed = options_.shared_memory.allowed,
                      .key_prefix = options_.shared_memory.prefix,
                      .open_cuda = OpenCudaMemoryOf(backends_->cudnn.device())}),
      oip_methods_(
          shared_memory_, [this] { return readiness_.is_ready(); },
          [this](absl::string_view method) { return Observe(method); }, memory_->clock,
          {.sequences = caches_.SequencesOrNull(), .repository = repository_.get()}),
      native_methods_(environment_, shared_memory_, repository_.get(), caches_.StoreOrNull(),
                      [this](absl::string_view method) { return Observe(method); }),
      cache_methods_(caches_.StoreOrNull(),
                     [this](absl::string_view method) { return Observe(method); }),
      health_status_({oip::kServiceName, native::kServiceName, native::kCacheServiceName}),
      json_threads_(WireThreads(options_.compute.threads), memory_->clock),
      json_inference_{oip_methods_, memory_->pool, json_threads_, options_.http.max_json_bytes},
      http_services_{environment_, memory_->pool} {
  oip_methods_.AddTo(methods_);
  native_methods_.AddTo(methods_);
  cache_methods_.AddTo(methods_);
  methods_["/grpc.health.v1.Health/Check"] = SmallMethod(
      health_status_, &HealthStatus::Respond, [](const CallReport&) {}, /*is_public=*/true);
  oip_methods_.AddTo(stream_methods_, environment_);
  native_methods_.AddTo(stream_methods_);
  cache_methods_.AddTo(stream_methods_, environment_);
  stream_methods_["/grpc.health.v1.Health/Watch"] = [this](MessageStream& stream) {
    return std::make_unique<HealthWatch>(environment_, health_status_, stream);
  };
  if (options_.grpc.reflection) {
    reflection_ = std::make_unique<Reflection>(environment_, methods_, stream_methods_);
    reflection_->AddTo(stream_methods_);
  }
  ExportMetrics();
}

ServerImpl::~ServerImpl() { readiness_.Withdraw(); }

void ServerImpl::ExportMetrics() {
  open_calls_.ExportTo(metrics_);
  streams_.ExportTo(metrics_);
  executor_.ExportTo(metrics_);
  ExportQueue(
      "lanes", [this] { return lanes_ == nullptr ? QueueState{} : lanes_->waiting(); }, metrics_);
  memory_->gate.ExportTo(metrics_);
  metrics_.AddGauge("rapt_oldest_request_age_seconds",
                    "Age of the oldest waiting request of all queues.", {},
                    [this] { return OldestRequestAge().count(); });
  memory_->pool.ExportTo(metrics_);
  caches_.store.ExportTo(metrics_);
  backends_->cudnn.ExportTo(metrics_);
  readiness_.ExportTo(metrics_);
  ExportProcess(metrics_);
  ExportLog(metrics_);
  ExportBuild();
}

std::chrono::duration<double> ServerImpl::OldestRequestAge() const {
  const auto age_of_lane = lanes_ == nullptr ? QueueState{} : lanes_->waiting();
  return std::max(
      {memory_->gate.waiting().oldest_age, executor_.waiting().oldest_age, age_of_lane.oldest_age});
}

void ServerImpl::ExportBuild() {
  const std::string isa = ChooseIsa(CpuBackend(), options_.compute.isa);
  const bool cudnn = backends_->cudnn.Available().ok();
  metrics_.AddGauge(
      "rapt_build_info", "Version, instruction set of the CPU backend, cuDNN; always 1.",
      {{"version", std::string(Version())}, {"isa", isa}, {"cudnn", cudnn ? "yes" : "unavailable"}},
      [] { return 1; });
}

CallObserver ServerImpl::Observe(absl::string_view method) {
  return [this, method = std::string(method),
          count = metrics_.ForMethod(method)](const CallReport& report) {
    count(report);
    slow_calls_.Note(method, report);
  };
}

absl::Status ServerImpl::Start(absl::FunctionRef<bool()> stop_requested) {
  google::protobuf::SetLogHandler(nullptr);  // it would log every malformed message
  if (repository_ != nullptr) RAPT_RETURN_IF_ERROR(repository_->LoadAll(stop_requested));
  RAPT_RETURN_IF_ERROR(Listen());
  RAPT_RETURN_IF_ERROR(WaitUntilWarm(stop_requested));
  RAPT_RETURN_IF_ERROR(MeasureSpeeds(stop_requested));
  RAPT_RETURN_IF_ERROR(readiness_.Start([this](bool ready) { health_status_.SetServing(ready); }));
  LogReady();
  return absl::OkStatus();
}

absl::Status ServerImpl::Listen() {
  http2_server_ = std::make_unique<Http2Server>(
      Http2Settings{.address = options_.grpc.address,
                    .tls = tls_.get(),
                    .unix_socket = options_.grpc.unix_socket,
                    .unix_socket_mode = options_.grpc.unix_socket_mode.bits,
                    .max_connections = options_.grpc.max_connections,
                    .max_connections_per_address = options_.grpc.max_connections_per_address,
                    .connection = {.max_streams = options_.grpc.max_streams_per_connection,
                                   .max_idle = options_.grpc.max_connection_idle,
                                   .max_age = options_.grpc.max_connection_age,
                                   .max_call_time = options_.calls.max_deadline},
                    .threads = WireThreads(options_.compute.threads)},
      environment_, memory_->pool, methods_, stream_methods_);
  http2_server_->ExportTo(metrics_);
  RAPT_RETURN_IF_ERROR(http2_server_->Start([this] {
    if (!options_.cache.instance_name.empty()) return;
    caches_.store.SetInstance(DefaultInstance(grpc_address()));
  }));
  RAPT_RETURN_IF_ERROR(ServeRest());  // its calls need the name of the instance
  return ServeProbes();               // a scrape reads what the others have registered
}

absl::Status ServerImpl::ServeRest() {
  if (options_.http.address.empty()) return absl::OkStatus();
  http::Router router;
  http::AddOpenApi(router);
  if (options_.http.explorer) http::AddExplorer(router);
  oip::AddRestMethods(
      json_inference_, [this](absl::string_view method) { return Observe(method); }, router);
  native::AddRestMethods(
      {methods_, memory_->pool, json_threads_, options_.http.max_json_bytes},
      [this](absl::string_view method) { return Observe(method); }, router);
  RAPT_ASSIGN_OR_RETURN(
      rest_,
      http::Server::Start({.address = options_.http.address,
                           .tls = tls_.get(),
                           .threads = WireThreads(options_.compute.threads),
                           .max_connections = options_.grpc.max_connections,
                           .max_connections_per_address = options_.grpc.max_connections_per_address,
                           .connection = {.hosts = HostNamesOf(options_),
                                          .allowed_origins = ItemsOf(options_.http.allow_origin),
                                          .refuses_other_origins = true}},
                          ServeBy(std::move(router)), memory_->clock, &http_services_));
  rest_->ExportTo(metrics_);
  return absl::OkStatus();
}

absl::Status ServerImpl::ServeProbes() {
  http::Router router = http::ProbeRoutes([this] { return metrics_.Serialize(); },
                                          [this] { return readiness_.is_ready(); });
  RAPT_ASSIGN_OR_RETURN(probes_,
                        http::Server::Start({.address = options_.metrics_address,
                                             .max_connections = kProbeConnections,
                                             .max_connections_per_address = kProbeConnections},
                                            ServeBy(std::move(router)), memory_->clock));
  return absl::OkStatus();
}

// Runs it on a thread of gRPC once a thread of HTTP has run, so that it waits for both. The server
// of HTTP is shut down first, and each runs what was posted to it.
void ServerImpl::PostToWire(absl::AnyInvocable<void()> run) {
  if (rest_ == nullptr) return http2_server_->Post(std::move(run));
  rest_->Post([this, run = std::move(run)]() mutable { http2_server_->Post(std::move(run)); });
}

// Waits for the kernels of --cudnn_warm_plans.
absl::Status ServerImpl::WaitUntilWarm(absl::FunctionRef<bool()> stop_requested) const {
  constexpr std::chrono::milliseconds kInterval{50};
  const Instant begin = memory_->clock.Now();
  cudnn::PlanCache::Counts plans = backends_->cudnn.warmth();
  if (plans.ready + plans.compiling + plans.declined == 0) return absl::OkStatus();
  for (; plans.compiling > 0; plans = backends_->cudnn.warmth()) {
    if (stop_requested()) return absl::CancelledError("stopped while kernels were compiled");
    std::this_thread::sleep_for(kInterval);
  }
  Log(LogLevel::kInfo, "kernels compiled",
      {{"ready", plans.ready},
       {"declined", plans.declined},
       {"ms", Milliseconds(memory_->clock.Now() - begin)}});
  return absl::OkStatus();
}

// Measures the speed of GPU and CPU, on which "auto" bases its decision, unless an option sets the
// threshold. If the measurement fails, the default threshold remains.
absl::Status ServerImpl::MeasureSpeeds(absl::FunctionRef<bool()> stop_requested) {
  if (!backends_->cudnn.measures()) return absl::OkStatus();
  absl::Status status =
      backends_->cudnn.Measure(plan_options_.threads, [&] { return !stop_requested(); });
  if (status.ok() || absl::IsCancelled(status)) return status;
  Log(LogLevel::kWarning, "GPU speed not measured", {{"reason", status.message()}});
  return absl::OkStatus();
}

void ServerImpl::LogReady() const {
  Log(LogLevel::kInfo, "ready",
      {{"version", Version()},
       {"grpc", grpc_address()},
       {"metrics", metrics_address()},
       {"http", http_address()},
       {"grpc_security", security()},
       {"metrics_security", "plaintext"},
       {"backend", options_.compute.backend},
       {"isa", options_.compute.isa},
       {"threads", options_.compute.threads},
       {"memory_budget_bytes", options_.admission.memory_budget_bytes},
       {"kv_cache_bytes", options_.cache.bytes},
       {"max_message_bytes", options_.calls.max_message_bytes},
       {"max_connections", options_.grpc.max_connections}});
}

std::string ServerImpl::grpc_address() const {
  std::vector<std::string> addresses;
  if (!options_.grpc.address.empty()) {
    addresses.push_back(WithPort(options_.grpc.address, http2_server_->port()));
  }
  const std::string& socket = options_.grpc.unix_socket;
  if (!socket.empty()) addresses.push_back(absl::StrCat("unix:", socket));
  return absl::StrJoin(addresses, ",");
}

std::string ServerImpl::security() const {
  const SecurityOptions& files = options_.security;
  const std::string transport = options_.grpc.address.empty() ? "unix"
                                : files.tls_cert.empty()      ? "plaintext"
                                : files.tls_client_ca.empty() ? "tls"
                                                              : "mtls";
  return files.token_file.empty() ? transport : absl::StrCat(transport, "+tokens");
}

void ServerImpl::ReloadFiles() {
  access_->Reload();
  if (tls_ != nullptr) tls_->Reload();
}

// Live caches keep the server up while their callers go on, until the grace period ends.
void ServerImpl::WaitForCaches(Instant end) const {
  constexpr std::chrono::milliseconds kInterval{20};
  const cache::CacheStore& store = caches_.store;
  if (store.caches() == 0) return;
  Log(LogLevel::kInfo, "waiting for the callers of caches",
      {{"caches", store.caches()},
       {"quiet_time", absl::FormatDuration(absl::FromChrono(kCacheQuietTime))},
       {"grace_period", absl::FormatDuration(absl::FromChrono(options_.drain.grace_period))}});
  int64_t uses = store.uses();
  Instant last_use = memory_->clock.Now();
  for (Instant now = last_use; store.caches() > 0 && now < end; now = memory_->clock.Now()) {
    if (std::exchange(uses, store.uses()) != uses || open_calls_.count() > 0) last_use = now;
    if (now - last_use >= kCacheQuietTime) break;
    std::this_thread::sleep_for(kInterval);
  }
  if (store.caches() == 0) return;
  Log(LogLevel::kInfo, "caches end with the server",
      {{"caches", store.caches()},
       {"reason", memory_->clock.Now() < end ? "no calls" : "grace period expired"}});
}

void ServerImpl::Drain() {
  // First, so that a caller who sees the server not ready gets no connection that stays open.
  if (rest_ != nullptr) rest_->GoAway();
  readiness_.Withdraw();
  caches_.store.StopCreating();
  health_status_.SetServing(false);
  // Callers use other connections, if they can, before their calls are refused. Calls that they
  // have begun have the pause to send their messages.
  if (http2_server_ != nullptr) http2_server_->GoAway();
  std::this_thread::sleep_for(options_.drain.pause);
  // Also those that have connected meanwhile.
  if (http2_server_ != nullptr) http2_server_->GoAway();
  engine_.StopAccepting();
  // Callers that get UNAVAILABLE retry elsewhere; few retry the CANCELLED of a call that the
  // shutdown ends.
  const auto refused_until = std::chrono::steady_clock::now() + options_.drain.refusal_time;
  const Instant grace_end = memory_->clock.Now() + options_.drain.grace_period;
  WaitForCaches(grace_end);
  const auto rest = std::max(std::chrono::nanoseconds(0), grace_end - memory_->clock.Now());
  if (!open_calls_.WaitUntilNone(rest)) {
    Log(LogLevel::kWarning, "grace period expired", {{"open_calls", open_calls_.count()}});
  }
  std::this_thread::sleep_until(refused_until);
  if (rest_ != nullptr) rest_->Shutdown(kTransportShutdownTime);
  if (http2_server_ != nullptr) http2_server_->Shutdown(kTransportShutdownTime);
  Log(LogLevel::kInfo, "stopped", {{"served_calls", open_calls_.served()}});
}

}  // namespace

absl::StatusOr<std::unique_ptr<Server>> Server::Create(const Options& options) {
  RAPT_ASSIGN_OR_RETURN(Configuration configuration, Configure(options));
  return std::make_unique<ServerImpl>(std::move(configuration));
}

}  // namespace rapt
