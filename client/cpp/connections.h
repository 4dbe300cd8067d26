// The connections to one server, and the way calls are spread over them.
#ifndef RAPT_CLIENT_CPP_CONNECTIONS_H_
#define RAPT_CLIENT_CPP_CONNECTIONS_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/grpc/health/v1/health.grpc.pb.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "rapt/client.h"

namespace rapt::client {

// Thread-safe.
struct Connection {
  explicit Connection(std::shared_ptr<grpc::Channel> to_server);

  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::AttentionService::Stub> attention;
  const std::unique_ptr<grpc::health::v1::Health::Stub> health;
  std::atomic<int> calls_in_flight{0};
};

// A call's use of a connection: counted while it lives. Movable, thread-compatible.
class ConnectionLease {
 public:
  explicit ConnectionLease(Connection& connection);

  const Connection& operator*() const { return *connection_; }
  const Connection* operator->() const { return connection_.get(); }

 private:
  struct Return {
    void operator()(Connection* connection) const;
  };
  std::unique_ptr<Connection, Return> connection_;
};

// What the connections are secured with, and the token that calls carry. InvalidArgument where the
// options contradict each other, or a file can't be read.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsFor(const std::string& address,
                                                                         const Options& options);

// Thread-safe.
class Connections {
 public:
  // With those that CredentialsFor() gives.
  Connections(const std::string& address, const Options& options,
              const std::shared_ptr<grpc::ChannelCredentials>& credentials);

  // Blocks until the first connection stands. Unavailable, with the address, when it is refused or
  // the time is over.
  absl::Status WaitUntilReady(std::chrono::nanoseconds timeout);

  // The connection with the fewest calls in flight; the first of equals, so that a caller who sends
  // one call after the other stays on one warm connection.
  ConnectionLease LeastBusy();

  // For who spreads calls himself; `i` counts on from the last one at the first again.
  const Connection& at(int i) const {
    return *connections_[static_cast<size_t>(i) % connections_.size()];
  }

  // The same code and message; Unavailable with the address before it, which is also what Cancelled
  // means unless the caller stopped the call.
  absl::Status FromGrpc(const grpc::Status& status, bool was_stopped) const;

 private:
  const std::string address_;
  const bool uses_tls_;
  std::vector<std::unique_ptr<Connection>> connections_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_CONNECTIONS_H_
