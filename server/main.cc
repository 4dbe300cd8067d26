// rapt-server: reads the options, wires the parts, serves until a signal, drains.
#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <initializer_list>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/grpc/health/v1/health.pb.h"
#include "server/admission/memory_budget.h"
#include "server/attention/attention.h"
#include "server/base/clock.h"
#include "server/base/host_limits.h"
#include "server/base/log.h"
#include "server/base/version.h"
#include "server/engine.h"
#include "server/execution/executor.h"
#include "server/metrics/http_endpoint.h"
#include "server/metrics/metrics.h"
#include "server/options.h"
#include "server/wire/oip/service.h"
#include "server/wire/open_calls.h"
#include "server/wire/rapt/service.h"

namespace rapt {
namespace {

constexpr int kExitFailure = 1;
constexpr int kExitUsage = 2;

// After readiness is withdrawn, new calls are still taken for a moment: routers need it to notice.
constexpr std::chrono::milliseconds kLameDuckPause{100};

// For the last refusals to leave. Only health watches, which never end by themselves, use it up.
// gRPC itself cancels what arrives from here on; routers have had their time to notice.
constexpr std::chrono::milliseconds kFarewell{500};

int Complain(const absl::Status& status, int exit_code) {
  std::fprintf(stderr, "rapt-server: %s\n", std::string(status.message()).c_str());
  return exit_code;
}

// gRPC's own errors become lines of our log, but for those of start-up, which Serve() tells better.
std::atomic<bool> log_grpc_errors{false};

void LogFromGrpc(gpr_log_func_args* args) {
  if (!log_grpc_errors || args->severity < GPR_LOG_SEVERITY_ERROR) return;
  Log(LogLevel::kError, "grpc", {{"message", args->message}});
}

std::string WithPort(const std::string& address, int port) {
  return absl::StrCat(address.substr(0, address.rfind(':') + 1), port);
}

struct GrpcServer {
  std::unique_ptr<grpc::Server> server;
  int port = 0;
};

absl::StatusOr<GrpcServer> StartGrpc(const Options& options,
                                     std::initializer_list<grpc::Service*> services) {
  // Reflection finds the health service's messages only if they are linked in.
  google::protobuf::LinkMessageReflection<grpc::health::v1::HealthCheckRequest>();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();

  GrpcServer result;
  grpc::ServerBuilder builder;
  builder.AddListeningPort(options.grpc_address, grpc::InsecureServerCredentials(), &result.port);
  for (grpc::Service* service : services) builder.RegisterService(service);
  // A second server on the same port is an error, not a silent partner.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  builder.SetMaxReceiveMessageSize(options.max_message_bytes);
  builder.SetMaxSendMessageSize(-1);
  // Identity only: a small compressed message can be a huge one.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  result.server = builder.BuildAndStart();
  if (result.server == nullptr || result.port == 0) {
    return absl::UnavailableError(absl::StrCat("can't listen on ", options.grpc_address,
                                               "; is the port in use, is the address ours?"));
  }
  return result;
}

// Blocks until SIGTERM or SIGINT; the next one ends the process at once.
int WaitForStopSignal(const sigset_t& stop_signals) {
  int signal_number = 0;
  sigwait(&stop_signals, &signal_number);
  pthread_sigmask(SIG_UNBLOCK, &stop_signals, nullptr);
  return signal_number;
}

void ShowGauges(Metrics& metrics, const OpenCalls& open_calls, const MemoryBudget& budget) {
  metrics.ShowGauge("rapt_open_calls", "Tensor calls that have no answer yet.",
                    [&open_calls] { return static_cast<double>(open_calls.count()); });
  metrics.ShowGauge("rapt_memory_budget_bytes", "What all requests together may take.",
                    [&budget] { return static_cast<double>(budget.capacity_bytes()); });
  metrics.ShowGauge("rapt_memory_reserved_bytes", "What they have taken.",
                    [&budget] { return static_cast<double>(budget.reserved_bytes()); });
}

void AnnounceReady(const Options& options, const std::string& grpc_address,
                   const std::string& metrics_address) {
  Log(LogLevel::kInfo, "ready",
      {{"version", Version()},
       {"grpc", grpc_address},
       {"metrics", metrics_address},
       {"backend", options.backend},
       {"isa", options.isa},
       {"threads", options.threads},
       {"memory_budget_bytes", options.memory_budget_bytes},
       {"max_message_bytes", options.max_message_bytes}});
  std::printf("rapt-server ready grpc=%s metrics=%s\n", grpc_address.c_str(),
              metrics_address.c_str());
  std::fflush(stdout);
}

// No new work, the work in flight to its end, then no server. Readiness has been withdrawn.
void Drain(const Options& options, Engine& engine, OpenCalls& open_calls, grpc::Server& server) {
  std::this_thread::sleep_for(kLameDuckPause);
  engine.StopAccepting();
  if (!open_calls.WaitUntilNone(options.grace_period)) {
    Log(LogLevel::kWarning, "grace period over", {{"open_calls", open_calls.count()}});
  }
  server.Shutdown(std::chrono::system_clock::now() + kFarewell);
}

int Serve(const Options& options, const sigset_t& stop_signals) {
  const PlanOptions plan_options{
      .backend = options.backend, .isa = options.isa, .threads = options.threads};
  if (absl::Status status = Validate(plan_options); !status.ok()) {
    return Complain(status, kExitUsage);
  }
  gpr_set_log_function(LogFromGrpc);

  const SteadyClock clock;
  Metrics metrics;
  MemoryBudget budget(options.memory_budget_bytes);
  Executor executor(options.threads, clock);
  Engine engine(plan_options, budget, executor);
  OpenCalls open_calls;
  ShowGauges(metrics, open_calls, budget);
  std::atomic<bool> ready{false};
  const auto is_ready = [&ready] { return ready.load(); };
  const auto observe = [&metrics](absl::string_view method) -> CallObserver {
    return [instruments = metrics.ForMethod(method)](absl::StatusCode code, auto duration) {
      instruments.CountCall(code, duration);
    };
  };
  const std::unique_ptr<grpc::Service> oip_service =
      oip::NewService(engine, open_calls, clock, is_ready, observe);
  const std::unique_ptr<grpc::Service> native_service =
      native::NewService({engine, open_calls, clock}, options.max_message_bytes, observe);

  const auto http = HttpEndpoint::Start(options.metrics_address, metrics, is_ready);
  if (!http.ok()) return Complain(http.status(), kExitFailure);
  const auto grpc_server = StartGrpc(options, {oip_service.get(), native_service.get()});
  if (!grpc_server.ok()) return Complain(grpc_server.status(), kExitFailure);
  grpc::HealthCheckServiceInterface& health = *grpc_server->server->GetHealthCheckService();
  for (const char* service : {oip::kServiceName, native::kServiceName}) {
    health.SetServingStatus(service, true);
  }
  ready = true;
  log_grpc_errors = true;

  AnnounceReady(options, WithPort(options.grpc_address, grpc_server->port),
                WithPort(options.metrics_address, (*http)->port()));

  const int signal_number = WaitForStopSignal(stop_signals);
  Log(LogLevel::kInfo, "draining",
      {{"signal", signal_number == SIGTERM ? "SIGTERM" : "SIGINT"},
       {"open_calls", open_calls.count()}});
  ready = false;
  health.SetServingStatus(false);
  Drain(options, engine, open_calls, *grpc_server->server);
  Log(LogLevel::kInfo, "stopped", {{"served_calls", open_calls.served()}});
  return EXIT_SUCCESS;
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

  const absl::StatusOr<Options> options = ParseOptions(
      std::vector<const char*>(argv + std::min(argc, 1), argv + argc),
      [](const char* name) -> const char* { return std::getenv(name); }, ReadHostLimits());
  if (!options.ok()) return Complain(options.status(), kExitUsage);
  if (!options->text_to_print.empty()) {
    std::fputs(options->text_to_print.c_str(), stdout);
    return EXIT_SUCCESS;
  }
  return Serve(*options, stop_signals);
}

}  // namespace
}  // namespace rapt

int main(int argc, char** argv) { return rapt::Main(argc, argv); }
