#include "server/wire/http2/http2_server.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <future>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/log_limit.h"
#include "server/wire/http2/http2_stream.h"
#include "server/wire/http2/tls_socket.h"
#include "server/wire/http2/unary_stream.h"
#include "server/wire/listening_sockets.h"
#include "server/wire/unix_socket.h"

namespace rapt {
namespace {

constexpr int kAcceptsPerRound = 64;
// Listening sockets have turns of their own. Multicast: the network of no peer.
constexpr PeerNetwork kListening = {0xFF};

// "ipv4:127.0.0.1:4711", "ipv6:[::1]:4711" or "unix:". IPv4 over an IPv6 socket is IPv4.
std::string PeerOf(const sockaddr_storage& address) {
  char text[INET6_ADDRSTRLEN] = {};
  if (address.ss_family == AF_INET) {
    const auto& name = reinterpret_cast<const sockaddr_in&>(address);
    inet_ntop(AF_INET, &name.sin_addr, text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(name.sin_port));
  }
  if (address.ss_family != AF_INET6) return "unix:";
  const auto& name = reinterpret_cast<const sockaddr_in6&>(address);
  if (IN6_IS_ADDR_V4MAPPED(&name.sin6_addr)) {
    inet_ntop(AF_INET, &name.sin6_addr.s6_addr[12], text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(name.sin6_port));
  }
  inet_ntop(AF_INET6, &name.sin6_addr, text, sizeof(text));
  return absl::StrCat("ipv6:[", text, "]:", ntohs(name.sin6_port));
}

}  // namespace

// Accepts the connections of a listening socket.
class Http2Server::Endpoint final : public EventLoop::Watcher {
 public:
  Endpoint(Http2Server& server, Descriptor listening, Connections& connections)
      : server_(server), listening_(std::move(listening)), connections_(connections) {}

  int descriptor() const { return listening_.get(); }

 private:
  void OnEvents(uint32_t) override {
    for (int i = 0; i < kAcceptsPerRound; ++i) {
      sockaddr_storage name = {};
      socklen_t size = sizeof(name);
      Descriptor socket(accept4(listening_.get(), reinterpret_cast<sockaddr*>(&name), &size,
                                SOCK_NONBLOCK | SOCK_CLOEXEC));
      if (socket.get() < 0) return OnFailure(errno);
      const PeerNetwork network = NetworkOf(name);
      if (connections_.Enter(network)) {
        server_.Open(std::move(socket), PeerOf(name), network, connections_);
      }
    }
  }

  // Without descriptors or memory, connections wait until the next tick.
  void OnFailure(int error) {
    if (!IsShortage(error)) return;
    if (const std::optional<int64_t> left_out = errors_.Take()) {
      Log(LogLevel::kWarning, "cannot accept connections",
          {{"reason", std::strerror(error)}, {"left_out", *left_out}});
    }
    is_paused_ = true;
    server_.wires_[0]->loop.Change(listening_.get(), 0);
  }

  void OnTick(Instant) override {
    if (std::exchange(is_paused_, false)) {
      server_.wires_[0]->loop.Change(listening_.get(), EPOLLIN);
    }
  }

  Http2Server& server_;
  const Descriptor listening_;
  Connections& connections_;
  LogLimit errors_{1, server_.environment_.clock};
  bool is_paused_ = false;
};

Http2Server::Http2Server(Http2Settings settings, const CallEnvironment& environment,
                         BufferPool& pool, const UnaryMethods& methods,
                         const StreamMethods& stream_methods)
    : settings_(std::move(settings)),
      environment_(environment),
      pool_(pool),
      methods_(methods),
      stream_methods_(stream_methods),
      tcp_({settings_.max_connections, settings_.max_connections_per_address}),
      unix_({settings_.max_connections, settings_.max_connections}) {}

Http2Server::~Http2Server() {
  if (!wires_.empty()) Shutdown(std::chrono::nanoseconds(0));
}

absl::Status Http2Server::Start(absl::FunctionRef<void()> on_bound) {
  ListeningSockets sockets;
  Descriptor unix_socket;
  if (!settings_.address.empty()) {
    absl::StatusOr<ListeningSockets> bound = ListenOn(settings_.address);
    if (!bound.ok()) return bound.status();
    sockets = *std::move(bound);
  }
  if (!settings_.unix_socket.empty()) {
    absl::StatusOr<Descriptor> bound =
        ListenOnUnix(settings_.unix_socket, settings_.unix_socket_mode);
    if (!bound.ok()) return bound.status();
    unix_socket = *std::move(bound);
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

void Http2Server::Listen(Descriptor listening, Connections& connections) {
  endpoints_.push_back(std::make_shared<Endpoint>(*this, std::move(listening), connections));
  wires_[0]->loop.Add(endpoints_.back()->descriptor(), EPOLLIN, endpoints_.back(), kListening);
}

bool Http2Server::Connections::Enter(const PeerNetwork& network) {
  MutexLock lock(mutex_);
  const bool has_entered = counts_.Enter(network);
  if (!has_entered) ++refused_;
  return has_entered;
}

void Http2Server::Connections::Leave(const PeerNetwork& network) {
  MutexLock lock(mutex_);
  counts_.Leave(network);
}

// Assigns connections to the threads in turn.
void Http2Server::Open(Descriptor socket, std::string peer, const PeerNetwork& network,
                       Connections& connections) {
  Wire& wire = NextWire();
  wire.loop.Run([this, &wire, &connections, network, socket = std::move(socket),
                 peer = std::move(peer)]() mutable {
    auto place = std::make_shared<LiveCount::Place>(live_);
    auto opened = std::make_shared<Connection*>();
    const auto connection = std::make_shared<Connection>(
        wire.loop, NewSocket(std::move(socket), connections), std::move(peer), settings_.connection,
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

std::unique_ptr<Socket> Http2Server::NewSocket(Descriptor socket, const Connections& connections) {
  if (settings_.tls != nullptr && &connections == &tcp_) {
    return settings_.tls->Accept(std::move(socket));
  }
  return std::make_unique<PlainSocket>(std::move(socket));
}

CallStream* Http2Server::NewCall(Connection& connection, int32_t id, const RequestHead& head) {
  if (!head.is_post()) {
    connection.SendHttpError(id, 405);
    return nullptr;
  }
  if (!head.is_grpc()) {
    connection.SendHttpError(id, 415);
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
    connection.SendStatus(
        id,
        absl::InvalidArgumentError(
            "header grpc-timeout is invalid; it must be 1 to 8 digits and one of H, M, S, m, u, n"),
        {});
    return nullptr;
  }
  CallHeaders headers = head.ToCallHeaders();
  headers.peer = connection.peer();
  headers.certificate = connection.certificate();
  if (stream_method != stream_methods_.end()) {
    auto* const stream = new Http2Stream(connection, id, environment_.engine, pool_, live_);
    stream->Serve(stream_method->second, headers, *timeout);
    return stream;
  }
  auto* const call = new UnaryStream(connection, id, environment_, pool_, live_, method->second);
  call->Begin(std::move(headers), *timeout, head.has_encoding());
  return call;
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
    for (const auto& endpoint : endpoints_) wires_[0]->loop.Remove(endpoint->descriptor());
    stopped.set_value();
  });
  stopped.get_future().wait();
  if (!settings_.unix_socket.empty()) unlink(settings_.unix_socket.c_str());
  OnEveryConnection(&Connection::EndStreams);
  live_.WaitUntilNone(time);
  OnEveryConnection(&Connection::Close);
  live_.WaitUntilNone();
  for (const auto& wire : wires_) wire->loop.Stop();
  endpoints_.clear();
  wires_.clear();
}

}  // namespace rapt
