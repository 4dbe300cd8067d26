#include "server/wire/http2/http2_server.h"

#include <sys/socket.h>
#include <unistd.h>

#include <future>
#include <optional>
#include <utility>

#include "base/invalid.h"
#include "base/status_macros.h"
#include "server/wire/http2/http2_stream.h"
#include "server/wire/listening_sockets.h"
#include "server/wire/tls_socket.h"
#include "server/wire/unary_stream_call.h"

namespace rapt {

Http2Server::Http2Server(Http2Settings settings, const CallEnvironment& environment,
                         BufferPool& pool, const UnaryMethods& methods,
                         const StreamMethods& stream_methods)
    : settings_(std::move(settings)),
      environment_(environment),
      pool_(pool),
      methods_(methods),
      stream_methods_(stream_methods),
      tcp_(settings_.max_connections, settings_.max_connections_per_address),
      unix_(settings_.max_connections, settings_.max_connections) {}

Http2Server::~Http2Server() {
  if (!wires_.empty()) Shutdown(std::chrono::nanoseconds(0));
}

absl::Status Http2Server::Start(absl::FunctionRef<void()> on_bound) {
  ListeningSockets sockets;
  Descriptor unix_socket;
  if (!settings_.address.empty()) {
    RAPT_ASSIGN_OR_RETURN(sockets, ListenOn(settings_.address));
  }
  if (!settings_.unix_socket.empty()) {
    RAPT_ASSIGN_OR_RETURN(unix_socket,
                          ListenOnUnix(settings_.unix_socket, settings_.unix_socket_mode));
  }
  port_ = sockets.port;
  on_bound();
  for (int i = 0; i < settings_.threads; ++i) {
    wires_.push_back(std::make_unique<Wire>(environment_.clock));
  }
  for (Descriptor& listening : sockets.descriptors) Listen(std::move(listening), tcp_);
  if (unix_socket.get() >= 0) Listen(std::move(unix_socket), unix_);
  for (const auto& wire : wires_) wire->loop.Start();
  return absl::OkStatus();
}

void Http2Server::Listen(Descriptor listening, SharedConnectionCounts& connections) {
  acceptors_.push_back(std::make_shared<Acceptor>(
      wires_[0]->loop, std::move(listening),
      [this, &connections](Descriptor socket, const sockaddr_storage& peer) {
        const PeerNetwork network = NetworkOf(peer);
        if (connections.Enter(network)) {
          Open(std::move(socket), PeerNameOf(peer), network, connections);
        }
      }));
  acceptors_.back()->Start();
}

// Assigns connections to the threads in turn.
void Http2Server::Open(Descriptor socket, std::string peer, const PeerNetwork& network,
                       SharedConnectionCounts& connections) {
  Wire& wire = NextWire();
  wire.loop.Run([this, &wire, &connections, network, socket = std::move(socket),
                 peer = std::move(peer)]() mutable {
    auto place = std::make_shared<LiveCount::Place>(live_);
    auto opened = std::make_shared<Connection*>();
    const auto connection = std::make_shared<Connection>(
        wire.loop, NewSocket(std::move(socket), connections), std::move(peer), settings_.connection,
        wire.paused,
        [this](Connection& c, int32_t id, const RequestHead& head) { return NewCall(c, id, head); },
        [&wire, &connections, network, place, opened] {
          connections.Leave(network);
          wire.connections.erase(*opened);
        });
    *opened = connection.get();
    wire.connections.insert(connection.get());
    connection->Start(network);
  });
}

std::unique_ptr<Socket> Http2Server::NewSocket(Descriptor socket,
                                               const SharedConnectionCounts& connections) {
  if (settings_.tls != nullptr && &connections == &tcp_) {
    return settings_.tls->Accept(std::move(socket));
  }
  return std::make_unique<PlainSocket>(std::move(socket));
}

CallStream* Http2Server::NewCall(Connection& connection, int32_t id, const RequestHead& head) {
  if (!head.is_post() || !head.is_grpc()) {
    connection.SendHttpError(id, head.is_post() ? 415 : 405);
    return nullptr;
  }
  const auto method = methods_.find(head.path());
  const auto stream_method = stream_methods_.find(head.path());
  if (method == methods_.end() && stream_method == stream_methods_.end()) {
    connection.SendStatus(id, absl::UnimplementedError("unknown method"), {});
    return nullptr;
  }
  const auto timeout = head.timeout();
  if (!timeout) {
    connection.SendStatus(id, Invalid("header ", kTimeoutHeader, " is invalid; ", kTimeoutFormat),
                          {});
    return nullptr;
  }
  CallHeaders headers = head.ToCallHeaders();
  headers.peer = connection.peer();
  headers.certificate = connection.certificate();
  const bool is_unary = method != methods_.end();
  const Http2Stream::Traits traits = {
      .is_unary = is_unary,
      .carries_tensors = is_unary && method->second.traits.carries_tensors,
      .has_encoding = head.has_encoding()};
  auto* const stream = new Http2Stream(connection, id, traits, environment_.engine, pool_, live_);
  const auto new_call = [&](MessageStream& messages) -> std::unique_ptr<StreamCall> {
    if (!is_unary) return stream_method->second(messages);
    return std::make_unique<UnaryStreamCall>(environment_, method->second, messages);
  };
  stream->Serve(new_call, headers, *timeout);
  return stream;
}

void Http2Server::ExportTo(MetricSink& sink) const {
  sink.AddGauge("rapt_open_connections", "Open TCP connections to the gRPC address.", {},
                [this] { return tcp_.count(); });
  sink.AddCounter("rapt_refused_connections_total",
                  "Connections closed by --max_connections or --max_connections_per_address.", {},
                  [this] { return tcp_.refused(); });
}

void Http2Server::OnEveryConnection(void (Connection::*function)()) {
  for (const auto& wire : wires_) {
    std::promise<void> done;
    wire->loop.Post([&wire = *wire, &done, function] {
      const std::vector<Connection*> all(wire.connections.begin(), wire.connections.end());
      for (Connection* connection : all) (connection->*function)();
      done.set_value();
    });
    done.get_future().wait();
  }
}

void Http2Server::Shutdown(std::chrono::nanoseconds time) {
  std::promise<void> stopped;
  wires_[0]->loop.Post([this, &stopped] {
    for (const auto& acceptor : acceptors_) acceptor->Stop();
    stopped.set_value();
  });
  stopped.get_future().wait();
  if (!settings_.unix_socket.empty()) unlink(settings_.unix_socket.c_str());
  OnEveryConnection(&Connection::EndStreams);
  live_.WaitUntilNone(time);
  OnEveryConnection(&Connection::Close);
  live_.WaitUntilNone();
  for (const auto& wire : wires_) wire->loop.Stop();
  acceptors_.clear();
  wires_.clear();
}

}  // namespace rapt
