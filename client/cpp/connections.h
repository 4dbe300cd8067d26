// The connections to one server, and the distribution of calls over them.
#ifndef RAPT_CLIENT_CPP_CONNECTIONS_H_
#define RAPT_CLIENT_CPP_CONNECTIONS_H_

#include <grpcpp/grpcpp.h>

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "proto/grpc/health/v1/health.grpc.pb.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "proto/rapt/v1/cache.grpc.pb.h"
#include "rapt/client.h"

namespace rapt::client {

// Thread-safe.
struct Connection {
  explicit Connection(std::shared_ptr<grpc::Channel> to_server);

  const std::shared_ptr<grpc::Channel> channel;
  const std::unique_ptr<v1::AttentionService::Stub> attention;
  const std::unique_ptr<v1::CacheService::Stub> cache;
  const std::unique_ptr<inference::GRPCInferenceService::Stub> open_inference;

  // Returns one of the three by its type.
  template <typename Stub>
  Stub& StubOf() const {
    return *std::get<const std::unique_ptr<Stub>&>(std::tie(attention, cache, open_inference));
  }

  std::atomic<int> calls_in_flight{0};
};

// A call's use of a connection, counted while the lease lives. Movable, thread-compatible.
class ConnectionLease {
 public:
  explicit ConnectionLease(Connection& connection);

  const Connection& operator*() const { return *connection_; }
  const Connection* operator->() const { return connection_.get(); }

 private:
  struct Release {
    void operator()(Connection* connection) const;
  };
  std::unique_ptr<Connection, Release> connection_;
};

// Returns the credentials of the connections, with the token that calls carry. InvalidArgument if
// the options contradict each other or a file can't be read.
absl::StatusOr<std::shared_ptr<grpc::ChannelCredentials>> CredentialsFor(const std::string& address,
                                                                         const Options& options);

// Thread-safe.
class Connections {
 public:
  // REQUIRES: `credentials` came from CredentialsFor().
  Connections(const std::string& address, const Options& options,
              const std::shared_ptr<grpc::ChannelCredentials>& credentials);

  // Blocks until the first connection has a server that is ready. Unavailable, with the address, if
  // no server accepts it, all report that they are not ready, or the timeout expires.
  absl::Status WaitUntilReady(std::chrono::nanoseconds timeout);

  // Returns the connection with the fewest calls in flight. Ties go to the first one, so that
  // sequential calls stay on one warm connection.
  ConnectionLease LeastBusy();

  // For callers that distribute calls themselves. `i` wraps around.
  const Connection& at(int i) const {
    return *connections_[static_cast<size_t>(i) % connections_.size()];
  }

  // On a connection of its own, which also servers that are not ready get. Opened by the first
  // call.
  grpc::health::v1::Health::Stub& health() const { return *health_; }

  // For streams of any length: little is read before the caller asks for it. Opened by the first
  // call.
  const Connection& exports() const { return exports_; }

  // Keeps code and message. Unavailable gets the address as a prefix. Cancelled becomes Unavailable
  // unless the caller stopped the call.
  absl::Status FromGrpc(const grpc::Status& status, bool was_stopped) const;

 private:
  const std::string address_;
  const bool uses_tls_;
  const std::unique_ptr<grpc::health::v1::Health::Stub> health_;
  const Connection exports_;
  std::vector<std::unique_ptr<Connection>> connections_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_CONNECTIONS_H_
