// The gRPC server: which services, on which address, within which limits.
#ifndef RAPT_SERVER_WIRE_GRPC_GRPC_SERVER_H_
#define RAPT_SERVER_WIRE_GRPC_GRPC_SERVER_H_

#include <grpcpp/impl/service_type.h>
#include <grpcpp/security/server_credentials.h>
#include <grpcpp/server.h>

#include <chrono>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "server/wire/grpc/listener.h"
#include "server/wire/grpc/receive_quota.h"
#include "server/wire/grpc/tensor_methods.h"

namespace rapt {

struct GrpcSettings {
  Listener* listener = nullptr;  // takes the connections by TCP; null: there are none
  std::shared_ptr<grpc::ServerCredentials> credentials;  // theirs
  std::string unix_socket;  // the path of one beside it, in plain text; empty: none
  int unix_socket_mode = 0600;
  const ReceiveQuota& quota;
  int max_streams_per_connection = 0;
  std::chrono::milliseconds max_connection_idle{0};  // without a call
  std::chrono::milliseconds max_connection_age{0};   // 0: any
  std::chrono::milliseconds max_call_time{0};        // on a connection that has come to that age
  bool reflection = false;
  int threads = 1;  // of the wire: docs/tuning.md
};

// gRPC's own errors become lines of our log, from the first server that listens on; those of
// start-up are told by StartGrpc() in better words. Protocol Buffers log nothing. Call it before.
void TakeOverGrpcLog();

// A server that listens. Everything borrowed outlives it.
class GrpcServer {
 public:
  GrpcServer(std::unique_ptr<grpc::Server> server, TensorMethods& tensor_methods)
      : server_(std::move(server)), tensor_methods_(tensor_methods) {}
  ~GrpcServer() { Shutdown(std::chrono::system_clock::now()); }
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // Takes no more calls, cancels those that have not ended at the deadline, and returns when the
  // last one has. The listener has to be stopped before.
  void Shutdown(std::chrono::system_clock::time_point deadline) {
    server_->Shutdown(deadline);
    tensor_methods_.Stop();
  }

 private:
  const std::unique_ptr<grpc::Server> server_;
  TensorMethods& tensor_methods_;
};

// Serves the services, and reflection. Unavailable where the socket can't be had.
absl::StatusOr<std::unique_ptr<GrpcServer>> StartGrpc(
    const GrpcSettings& settings, TensorMethods& tensor_methods,
    std::initializer_list<grpc::Service*> services);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_GRPC_SERVER_H_
