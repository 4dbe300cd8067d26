#include "server/wire/grpc_server.h"

#include <grpc/support/log.h>
#include <grpcpp/ext/proto_server_reflection_plugin.h>
#include <grpcpp/grpcpp.h>
#include <grpcpp/health_check_service_interface.h>

#include <atomic>

#include "absl/strings/str_cat.h"
#include "proto/grpc/health/v1/health.pb.h"
#include "server/base/log.h"
#include "server/wire/unix_socket.h"

namespace rapt {
namespace {

// Fewer and larger slices to read from. Measured, as everything in docs/tuning.md.
constexpr int kFrameBytes = 1 << 20;

std::atomic<bool> log_grpc_errors{false};

void LogFromGrpc(gpr_log_func_args* args) {
  if (!log_grpc_errors || args->severity < GPR_LOG_SEVERITY_ERROR) return;
  Log(LogLevel::kError, "grpc", {{"message", args->message}});
}

void LimitMemory(const GrpcSettings& settings, grpc::ServerBuilder& builder) {
  builder.SetResourceQuota(settings.quota.quota());
  // The window that a stream has before somebody reads it. It grows with the measured bandwidth
  // unless the probe is off, and then calls that wait for memory would take it.
  builder.AddChannelArgument(GRPC_ARG_HTTP2_STREAM_LOOKAHEAD_BYTES, kStreamWindowBytes);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_BDP_PROBE, 0);
  builder.AddChannelArgument(GRPC_ARG_HTTP2_MAX_FRAME_SIZE, kFrameBytes);
  builder.SetMaxReceiveMessageSize(settings.max_message_bytes);
  builder.SetMaxSendMessageSize(-1);
  // Identity only: a small compressed message can be a huge one.
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_DEFLATE, false);
  builder.SetCompressionAlgorithmSupportStatus(GRPC_COMPRESS_GZIP, false);
}

// Builds the server with its listeners. InvalidArgument, Unavailable.
absl::StatusOr<GrpcServer> Listen(const GrpcSettings& settings, grpc::ServerBuilder& builder) {
  GrpcServer result;
  int socket = 0;  // not 0 once it is bound, as gRPC has it
  if (!settings.address.empty()) {
    builder.AddListeningPort(settings.address, settings.credentials, &result.port);
  }
  if (!settings.unix_socket.empty()) {
    if (absl::Status status = MakeRoomForSocket(settings.unix_socket); !status.ok()) return status;
    builder.AddListeningPort(absl::StrCat("unix:", settings.unix_socket),
                             grpc::InsecureServerCredentials(), &socket);
  }
  // A second server on the same port is an error, not a silent partner.
  builder.AddChannelArgument(GRPC_ARG_ALLOW_REUSEPORT, 0);
  {
    const ScopedFileMode mode(settings.unix_socket_mode);
    result.server = builder.BuildAndStart();
  }
  const bool no_address = !settings.address.empty() && result.port == 0;
  if (result.server != nullptr && !no_address) return result;
  if (no_address || settings.unix_socket.empty()) {
    return absl::UnavailableError(absl::StrCat("can't listen on ", settings.address,
                                               "; is the port in use, is the address ours?"));
  }
  return absl::UnavailableError(absl::StrCat("can't listen on ", settings.unix_socket,
                                             "; is there such a folder, may we write there?"));
}

}  // namespace

void TakeOverGrpcLog() { gpr_set_log_function(LogFromGrpc); }

absl::StatusOr<GrpcServer> StartGrpc(const GrpcSettings& settings, TensorMethods& tensor_methods,
                                     std::initializer_list<grpc::Service*> services,
                                     std::initializer_list<const char*> service_names) {
  // Reflection finds the health service's messages only if they are linked in.
  google::protobuf::LinkMessageReflection<grpc::health::v1::HealthCheckRequest>();
  grpc::EnableDefaultHealthCheckService(true);
  grpc::reflection::InitProtoReflectionServerBuilderPlugin();

  grpc::ServerBuilder builder;
  for (grpc::Service* service : services) builder.RegisterService(service);
  builder.RegisterCallbackGenericService(&tensor_methods);
  LimitMemory(settings, builder);
  absl::StatusOr<GrpcServer> result = Listen(settings, builder);
  if (!result.ok()) return result;
  grpc::HealthCheckServiceInterface& health = *result->server->GetHealthCheckService();
  for (const char* name : service_names) health.SetServingStatus(name, false);
  health.SetServingStatus(false);
  log_grpc_errors = true;
  return result;
}

}  // namespace rapt
