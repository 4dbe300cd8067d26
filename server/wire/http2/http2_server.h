// gRPC over HTTP/2 by nghttp2: addresses, threads and connections.
#ifndef RAPT_SERVER_WIRE_HTTP2_HTTP2_SERVER_H_
#define RAPT_SERVER_WIRE_HTTP2_HTTP2_SERVER_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/container/flat_hash_set.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "base/buffer_pool.h"
#include "base/descriptor.h"
#include "base/metric_sink.h"
#include "server/calls/call.h"
#include "server/wire/acceptor.h"
#include "server/wire/connection_counts.h"
#include "server/wire/event_loop.h"
#include "server/wire/http2/connection.h"
#include "server/wire/http2/request_head.h"
#include "server/wire/live_count.h"
#include "server/wire/message_stream.h"
#include "server/wire/socket.h"
#include "server/wire/unary_method.h"

namespace rapt {

class TlsAcceptor;

struct Http2Settings {
  std::string address;         // "host:port"; empty: none
  TlsAcceptor* tls = nullptr;  // of the address; null: plain text
  std::string unix_socket;     // a path; empty: none
  int unix_socket_mode = 0600;
  int64_t max_connections = 0;  // of the address, and as many of the socket
  int64_t max_connections_per_address = 0;
  Connection::Settings connection;
  int threads = 1;
};

// Thread-safe after Start().
class Http2Server {
 public:
  // Everything borrowed outlives the server.
  Http2Server(Http2Settings settings, const CallEnvironment& environment, BufferPool& pool,
              const UnaryMethods& methods, const StreamMethods& stream_methods);
  ~Http2Server();
  Http2Server(const Http2Server&) = delete;
  Http2Server& operator=(const Http2Server&) = delete;

  // Binds the addresses, calls `on_bound`, which may use port(), and serves. InvalidArgument,
  // Unavailable. Call it once.
  absl::Status Start(absl::FunctionRef<void()> on_bound = [] {});

  // The port of the address. REQUIRES: Start() has bound it.
  int port() const { return port_; }

  // Runs a task on one of the threads, on each in turn.
  void Post(EventLoop::Task task) { NextWire().loop.Post(std::move(task)); }

  void ExportTo(MetricSink& sink) const;

  // Tells all callers to open no more calls on their connections. Others are still accepted.
  void GoAway() { OnEveryConnection(&Connection::GoAway); }

  // Accepts no more connections and calls, ends those still open after `time`, and returns when the
  // last one has ended. REQUIRES: Start() was called.
  void Shutdown(std::chrono::nanoseconds time);

 private:
  // A thread and the connections that it serves, which only it touches.
  struct Wire {
    explicit Wire(const Clock& clock) : loop(clock) {}
    EventLoop loop;
    absl::flat_hash_set<Connection*> connections;
    Connection::Paused paused;
  };

  void Listen(Descriptor listening, SharedConnectionCounts& connections);
  Wire& NextWire() { return *wires_[next_wire_++ % wires_.size()]; }
  void Open(Descriptor socket, std::string peer, const PeerNetwork& network,
            SharedConnectionCounts& connections);
  std::unique_ptr<Socket> NewSocket(Descriptor socket, const SharedConnectionCounts& connections);
  CallStream* NewCall(Connection& connection, int32_t id, const RequestHead& head);
  void OnEveryConnection(void (Connection::*function)());

  const Http2Settings settings_;
  const CallEnvironment& environment_;
  BufferPool& pool_;
  const UnaryMethods& methods_;
  const StreamMethods& stream_methods_;

  int port_ = 0;
  SharedConnectionCounts tcp_, unix_;
  LiveCount live_;  // calls and connections
  std::vector<std::shared_ptr<Acceptor>> acceptors_;
  std::atomic<size_t> next_wire_{0};
  std::vector<std::unique_ptr<Wire>> wires_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_HTTP2_SERVER_H_
