// An HTTP/1.1 server.
#ifndef RAPT_SERVER_WIRE_HTTP_SERVER_H_
#define RAPT_SERVER_WIRE_HTTP_SERVER_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/buffer_pool.h"
#include "base/clock.h"
#include "base/metric_sink.h"
#include "server/calls/call.h"
#include "server/wire/acceptor.h"
#include "server/wire/connection_counts.h"
#include "server/wire/event_loop.h"
#include "server/wire/http/connection.h"
#include "server/wire/http/router.h"
#include "server/wire/listening_sockets.h"
#include "server/wire/live_count.h"

namespace rapt {
class TlsAcceptor;
}  // namespace rapt

namespace rapt::http {

struct ServerSettings {
  std::string address;         // that of ListenOn()
  TlsAcceptor* tls = nullptr;  // null: plain text
  int threads = 1;
  // Beyond this, a new connection replaces one without a call: of the address with the most of
  // them, the one that has waited longest since its last response. Where its own address is at the
  // next limit, it replaces none of another address.
  int64_t max_connections = 128;
  // Beyond this, new ones are refused. 0: a quarter of max_connections.
  int64_t max_connections_per_address = 128;
  // Bytes of unsent responses without a call, per thread. A single response may exceed it. Beyond
  // this, connections that hold one are closed: of the address that holds the most, the one that
  // has waited longest.
  int64_t max_held_bytes = int64_t{4} << 20;
  ConnectionSettings connection = {};
};

// What calls need.
struct CallServices {
  const CallEnvironment& environment;
  BufferPool& pool;
};

// Chooses what serves a request, such as Router::Find. Short and thread-safe. An exception becomes
// a response 500.
using Serve = std::function<Served(const Request&)>;

// Serves from construction to Shutdown(). A connection holds at most the bytes of a head and what
// its call has reserved, or a response without a call. Thread-safe.
class Server {
 public:
  // Returns Unavailable if the address can't be bound. Null `calls`: nothing that `serve` returns
  // is a call. Everything borrowed outlives the server.
  static absl::StatusOr<std::unique_ptr<Server>> Start(ServerSettings settings, Serve serve,
                                                       const Clock& clock,
                                                       const CallServices* calls = nullptr);
  // Closes all connections.
  ~Server();
  Server(const Server&) = delete;
  Server& operator=(const Server&) = delete;

  int port() const { return port_; }

  // Runs a task on one of the threads, on each in turn.
  void Post(EventLoop::Task task);

  void ExportTo(MetricSink& sink) const;

  // From now on, responses end their connections. Others are still accepted.
  void GoAway() { is_draining_ = true; }

  // Accepts no more connections, ends calls that are still open after `time`, and returns when the
  // last one has ended.
  void Shutdown(std::chrono::nanoseconds time);

 private:
  class Wire;
  class Waits;
  struct Entry;

  Server(ServerSettings settings, Serve serve, const Clock& clock, const CallServices* calls,
         ListeningSockets listening);
  void Open(Descriptor socket, const sockaddr_storage& peer);
  void OnEveryConnection(void (Connection::*function)());

  const ServerSettings settings_;
  const Serve serve_;
  const CallServices* const calls_;
  const int port_;
  std::atomic<bool> is_draining_{false};
  std::atomic<bool> is_stopping_{false};  // no connection opens
  SharedConnectionCounts counts_;
  LiveCount live_;  // calls and connections
  const std::unique_ptr<Waits> waits_;

  std::vector<std::unique_ptr<Wire>> wires_;
  std::vector<std::shared_ptr<Acceptor>> acceptors_;
  std::atomic<size_t> next_post_{0};
};

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_SERVER_H_
