// Accepts connections for the gRPC server, by TCP or on a Unix domain socket, and limits their
// number, in total and by the network of the peer. gRPC has no such limits.
#ifndef RAPT_SERVER_WIRE_GRPC_LISTENER_H_
#define RAPT_SERVER_WIRE_GRPC_LISTENER_H_

#include <grpcpp/server_builder.h>
#include <sys/types.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/descriptor.h"
#include "base/log_limit.h"
#include "base/metric_sink.h"
#include "base/mutex.h"
#include "server/wire/connection_counts.h"
#include "server/wire/listening_sockets.h"

namespace rapt {

// Thread-safe, except Start() and Stop().
class Listener {
 public:
  using Acceptor = grpc::experimental::ExternalConnectionAcceptor;

  // Binds and listens; connections wait until Start(). `address` is "host:port"; port 0 chooses a
  // free port. Unavailable if the address can't be bound.
  static absl::StatusOr<std::unique_ptr<Listener>> Bind(const std::string& address,
                                                        const ConnectionCounts& limits);
  // The same for a Unix domain socket with this file mode, which Stop() removes; without limits.
  // InvalidArgument if the path is too long, Unavailable if it can't be bound. Changes the umask
  // temporarily, so use it at startup only.
  static absl::StatusOr<std::unique_ptr<Listener>> BindUnix(const std::string& path, int mode);
  ~Listener() { Stop(); }
  Listener(const Listener&) = delete;
  Listener& operator=(const Listener&) = delete;

  int port() const { return listening_.port; }

  // Passes connections to the acceptor until Stop(); closes those beyond the limits. REQUIRES: the
  // acceptor's server runs.
  void Start(std::unique_ptr<Acceptor> acceptor);
  // Stops accepting. Accepted connections stay open.
  void Stop();

  // Number of open connections.
  int64_t count() const;
  // Number of connections closed because of the limit.
  int64_t refused() const { return refused_; }
  void ExportTo(MetricSink& sink) const;

 private:
  Listener(ListeningSockets listening, const ConnectionCounts& limits)
      : listening_(std::move(listening)), counts_(limits) {}

  void Run();
  bool TakeFrom(int listening);
  bool Enter(int connection, const PeerNetwork& network);
  void Forget() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  ListeningSockets listening_;
  std::string socket_path_;  // of a Unix domain socket
  Descriptor stop_;
  std::unique_ptr<Acceptor> acceptor_;
  std::atomic<int64_t> refused_{0};
  const SteadyClock clock_;
  LogLimit accept_errors_{1, clock_};

  // gRPC does not report closed connections. A connection has ended if its descriptor is closed or
  // refers to another inode.
  mutable Mutex mutex_;
  struct Connection {
    ino_t inode;
    PeerNetwork network;
  };
  mutable absl::flat_hash_map<int, Connection> open_ ABSL_GUARDED_BY(mutex_);  // by descriptor
  mutable ConnectionCounts counts_ ABSL_GUARDED_BY(mutex_);
  Instant next_forget_ ABSL_GUARDED_BY(mutex_) = Instant::min();

  std::thread thread_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_LISTENER_H_
