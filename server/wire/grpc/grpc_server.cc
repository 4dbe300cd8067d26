#include "server/wire/grpc/grpc_server.h"

#include <google/protobuf/stubs/logging.h>
#include <grpc/support/log.h>
#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <optional>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/log_limit.h"

namespace rapt {
namespace {

// Fewer and larger slices. Measurements: docs/tuning.md.
constexpr int kFrameBytes = 1 << 20;

// Ample for names, a token and a trace context.
constexpr int kMetadataBytes = 16 * 1024;

// Limit of the TLS and HTTP/2 handshakes.
constexpr std::chrono::seconds kHandshakeTime{20};

constexpr std::chrono::minutes kMinPingInterval{5};  // for callers, without data
constexpr std::chrono::minutes kOurPingInterval{2};
constexpr std::chrono::seconds kPingTimeout{20};

std::atomic<bool> log_grpc_errors{false};

// A peer can cause errors as fast as it sends.
constexpr int kGrpcLinesPerSecond = 5;

void LogFromGrpc(gpr_log_func_args* args) {
  static const SteadyClock clock;
  static LogLimit lines(kGrpcLinesPerSecond, clock);
  // gRPC aborts after this line.
  if (absl::StartsWith(args->message, "assertion failed")) {
    return LogNow(LogLevel::kError, "grpc", {{"message", args->message}});
  }
  if (!log_grpc_errors || args->severity < GPR_LOG_SEVERITY_ERROR) return;
  const std::optional<int64_t> left_out = lines.Take();
  if (!left_out) return;
  std::vector<LogField> fields = {{"message", args->message}};
  if (*left_out > 0) fields.emplace_back("left_out", *left_out);
  Log(LogLevel::kError, "grpc", fields);
}

void LimitMemory(const GrpcSettings& settings, grpc::ServerBuilder& builder) {
  builder.SetResourceQuota(settings.quota.quota());
  // The flow-control window of a stream that is not being read. The bandwidth probe would enlarge
  // it also for calls that wait for memory, so it is off.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindowBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  // gRPC 1.51 checks the size of a message only when it is complete, and does not report the
  // messages that it rejects. Call::AcceptMessage() does both; until then the quota limits memory.
  builder.SetMaxReceiveMessageSize(-1);
  builder.SetMaxSendMessageSize(-1);
  // Identity only: a small compressed message can expand to a huge one.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
  // Calls then skip the filters for compression and the channelz records, which are not used.
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_COMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_PER_MESSAGE_DECOMPRESSION, 0);
  builder.AddChannelArgument(GRPC_ARG_ENABLE_CHANNELZ, 0);
}

int Milliseconds(std::chrono::milliseconds time) { return static_cast<int>(time.count()); }

void LimitConnections(const GrpcSettings& settings, grpc::ServerBuilder& builder) {
  builder.AddChannelArgument(GRPC_ARG_MAX_CONCURRENT_STREAMS, settings.max_streams_per_connection);
  builder.AddChannelArgument(GRPC_ARG_MAX_METADATA_SIZE, kMetadataBytes);
  builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_IDLE_MS,
                             Milliseconds(settings.max_connection_idle));
  if (settings.max_connection_age.count() > 0) {
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_MS,
                               Milliseconds(settings.max_connection_age));
    builder.AddChannelArgument(GRPC_ARG_MAX_CONNECTION_AGE_GRACE_MS,
                               Milliseconds(settings.max_call_time));
  }
  builder.AddChannelArgument(GRPC_ARG_SERVER_HANDSHAKE_TIMEOUT_MS, Milliseconds(kHandshakeTime));
  // Closes connections that ping more often than that three times.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MIN_RECV_PING_INTERVAL_WITHOUT_DATA_MS,
                             Milliseconds(kMinPingInterval));
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PING_STRIKES, 2);
  // Closes connections of callers that vanished.
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIME_MS, Milliseconds(kOurPingInterval));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_TIMEOUT_MS, Milliseconds(kPingTimeout));
  builder.AddChannelArgument(GRPC_ARG_KEEPALIVE_PERMIT_WITHOUT_CALLS, 1);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_PINGS_WITHOUT_DATA, 0);  // no limit
}

// Returns null without a listener.
std::unique_ptr<Listener::Acceptor> AddAcceptor(
    const Listener* listener, const std::shared_ptr<grpc::ServerCredentials>& credentials,
    grpc::ServerBuilder& builder) {
  using Type = grpc::ServerBuilder::experimental_type::ExternalConnectionType;
  if (listener == nullptr) return nullptr;
  return builder.experimental().AddExternalConnectionAcceptor(Type::FROM_FD, credentials);
}

}  // namespace

void TakeOverGrpcLog() {
  gpr_set_log_function(LogFromGrpc);
  google::protobuf::SetLogHandler(nullptr);  // it would log every malformed message
}

absl::StatusOr<std::unique_ptr<GrpcServer>> StartGrpc(
    const GrpcSettings& settings, TensorMethods& tensor_methods,
    std::initializer_list<grpc::Service*> services) {
  grpc::ServerBuilder builder;
  for (grpc::Service* service : services) builder.RegisterService(service);
  builder.RegisterAsyncGenericService(&tensor_methods.service());
  // Other methods are synchronous; their threads do not poll this queue.
  std::unique_ptr<grpc::ServerCompletionQueue> queue = builder.AddCompletionQueue();
  LimitMemory(settings, builder);
  LimitConnections(settings, builder);
  auto acceptor = AddAcceptor(settings.listener, settings.credentials, builder);
  auto unix_acceptor =
      AddAcceptor(settings.unix_listener, grpc::InsecureServerCredentials(), builder);
  std::unique_ptr<grpc::Server> server = builder.BuildAndStart();
  if (server == nullptr) return absl::UnavailableError("gRPC can't start");
  tensor_methods.Start(std::move(queue), settings.threads);
  log_grpc_errors = true;
  if (acceptor != nullptr) settings.listener->Start(std::move(acceptor));
  if (unix_acceptor != nullptr) settings.unix_listener->Start(std::move(unix_acceptor));
  return std::make_unique<GrpcServer>(std::move(server), tensor_methods);
}

}  // namespace rapt
