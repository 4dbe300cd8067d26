// The gRPC server: which services, on which address, within which limits.
#ifndef RAPT_SERVER_WIRE_GRPC_SERVER_H_
#define RAPT_SERVER_WIRE_GRPC_SERVER_H_

#include <grpcpp/impl/service_type.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "server/wire/listener.h"
#include "server/wire/receive_quota.h"
#include "server/wire/tensor_methods.h"

namespace rapt {

struct GrpcSettings {
  Listener* listener = nullptr;  // takes the connections by TCP; null: there are none
  std::shared_ptr<grpc::ServerCredentials> credentials;  // theirs
  std::string unix_socket;  // the path of one beside it, in plain text; empty: none
  int unix_socket_mode = 0600;
  int max_message_bytes = 0;
  const ReceiveQuota& quota;
  int max_streams_per_connection = 0;
  std::chrono::milliseconds max_connection_idle{0};  // without a call
  std::chrono::milliseconds max_connection_age{0};   // 0: any
  std::chrono::milliseconds max_call_time{0};        // on a connection that has come to that age
  bool reflection = false;
};

// gRPC's own errors become lines of our log, from the first server that listens on; those of
// start-up are told by StartGrpc() in better words. Protocol Buffers log nothing. Call it before.
void TakeOverGrpcLog();

// Serves the services, reflection, and gRPC's health, which says of `service_names` and the server
// that they do not serve until it is told otherwise. Everything borrowed outlives the server.
// Unavailable where the socket can't be had. The listener has to be stopped before the server is
// shut down.
absl::StatusOr<std::unique_ptr<grpc::Server>> StartGrpc(
    const GrpcSettings& settings, TensorMethods& tensor_methods,
    std::initializer_list<grpc::Service*> services,
    std::initializer_list<const char*> service_names);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_SERVER_H_
