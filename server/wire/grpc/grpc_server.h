// The gRPC server: its services, addresses and limits.
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
  Listener* listener = nullptr;                          // accepts TCP connections; null: no TCP
  std::shared_ptr<grpc::ServerCredentials> credentials;  // of TCP connections
  Listener* unix_listener = nullptr;  // of a Unix domain socket, in plain text; null: none
  const ReceiveQuota& quota;
  int max_streams_per_connection = 0;
  std::chrono::milliseconds max_connection_idle{0};  // without calls
  std::chrono::milliseconds max_connection_age{0};   // 0: unlimited
  std::chrono::milliseconds max_call_time{0};        // on a connection that reached that age
  int threads = 1;                                   // that serve tensor calls, see docs/tuning.md
};

// Redirects gRPC's errors to the log once the first server listens; StartGrpc() reports startup
// errors itself. Silences Protocol Buffers. Call it before StartGrpc().
void TakeOverGrpcLog();

// A listening server. Everything that it references outlives it.
class GrpcServer {
 public:
  GrpcServer(std::unique_ptr<grpc::Server> server, TensorMethods& tensor_methods)
      : server_(std::move(server)), tensor_methods_(tensor_methods) {}
  ~GrpcServer() { Shutdown(std::chrono::system_clock::now()); }
  GrpcServer(const GrpcServer&) = delete;
  GrpcServer& operator=(const GrpcServer&) = delete;

  // Rejects new calls, cancels those still open at the deadline, and returns when the last one has
  // ended. REQUIRES: the listeners are stopped.
  void Shutdown(std::chrono::system_clock::time_point deadline) {
    server_->Shutdown(deadline);
    tensor_methods_.Stop();
  }

 private:
  const std::unique_ptr<grpc::Server> server_;
  TensorMethods& tensor_methods_;
};

// Serves the services. Unavailable if gRPC does not start.
absl::StatusOr<std::unique_ptr<GrpcServer>> StartGrpc(
    const GrpcSettings& settings, TensorMethods& tensor_methods,
    std::initializer_list<grpc::Service*> services);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_GRPC_SERVER_H_
