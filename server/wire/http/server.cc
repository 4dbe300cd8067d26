#include "server/wire/http/server.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <exception>
#include <future>
#include <optional>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/memory/memory.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "server/wire/connection_counts.h"
#include "server/wire/http/http_call.h"
#include "server/wire/socket.h"
#include "server/wire/tls_socket.h"

namespace rapt::http {
namespace {

bool IsLoopback(const Descriptor& listening) {
  sockaddr_storage name = {};
  socklen_t size = sizeof(name);
  getsockname(listening.get(), reinterpret_cast<sockaddr*>(&name), &size);
  if (name.ss_family == AF_INET) {
    const auto& address = reinterpret_cast<const sockaddr_in&>(name).sin_addr;
    return ntohl(address.s_addr) >> 24 == IN_LOOPBACKNET;
  }
  return IN6_IS_ADDR_LOOPBACK(&reinterpret_cast<const sockaddr_in6&>(name).sin6_addr);
}

}  // namespace

// A thread and the connections that it serves, which only it touches.
class Server::Wire final : public ConnectionOwner {
 public:
  Wire(Server& server, const Clock& clock)
      : loop_(clock, server.calls_ == nullptr ? "rapt-probes" : "rapt-http"), server_(server) {}

  EventLoop& loop() { return loop_; }

  // Connections that are open or about to be. Thread-safe.
  int64_t assigned() const { return assigned_; }

  // Opens a connection on this thread; on a full server, in place of another one, on its thread.
  // Thread-safe.
  void Assign(Descriptor socket, const sockaddr_storage& peer) {
    Assign([this, peer, socket = std::move(socket)]() mutable { Open(std::move(socket), peer); });
  }

  void OnEvery(void (Connection::*function)()) {
    std::vector<std::shared_ptr<Connection>> all;  // a connection may remove itself
    for (const auto& [connection, entry] : open_) all.push_back(connection->shared_from_this());
    for (const auto& connection : all) (connection.get()->*function)();
  }

 private:
  using Entrance = SharedConnectionCounts::Entrance;

  struct Entry {
    PeerNetwork network;
    int64_t wait;  // its number; 0 during a call
    LiveCount& live;
    LiveCount::Place live_place{live};
  };

  template <typename Function>
  void Assign(Function open) {
    ++assigned_;
    loop_.Run(std::move(open));
  }

  void Open(Descriptor socket, const sockaddr_storage& peer) {
    --assigned_;
    if (server_.is_stopping_) return;
    const PeerNetwork network = NetworkOf(peer);
    const Entrance entrance = server_.counts_.TryEnter(network);
    if (entrance == Entrance::kEntered) return Begin(std::move(socket), peer, network);
    const std::optional<Wait> replaced =
        entrance == Entrance::kFull ? server_.TakeLongestWait(network) : std::nullopt;
    if (!replaced.has_value()) return server_.counts_.Refuse();
    Wire& wire = *replaced->wire;
    wire.Assign([&wire, peer, wait = *replaced, socket = std::move(socket)]() mutable {
      wire.Replace(wait, std::move(socket), peer);
    });
  }

  void Begin(Descriptor socket, const sockaddr_storage& peer, const PeerNetwork& network) {
    const auto connection =
        std::make_shared<Connection>(loop_, NewSocket(std::move(socket)), PeerNameOf(peer), *this);
    const int64_t wait = server_.BeginWait({this, connection.get(), network});
    // Clang 14 can't initialize an aggregate by std::make_unique.
    open_.emplace(connection.get(),  // NOLINTNEXTLINE(modernize-make-unique)
                  std::unique_ptr<Entry>(new Entry{network, wait, server_.live_}));
    ++assigned_;
    connection->Start(network);
  }

  // The connection that waited may have begun a call meanwhile. Open() then looks for another one.
  void Replace(const Wait& wait, Descriptor socket, const sockaddr_storage& peer) {
    const auto found = open_.find(wait.connection);
    if (found != open_.end() && found->second->wait == wait.number) wait.connection->Close();
    Open(std::move(socket), peer);
  }

  const ConnectionSettings& settings() const override { return server_.settings_.connection; }
  bool is_draining() const override { return server_.is_draining_; }
  Served Serve(const Request& request) override { return server_.serve_(request); }

  ConnectionCall* NewCall(Connection& connection, CalledMethod called) override {
    RAPT_CHECK(server_.calls_ != nullptr, "this server has no calls");
    return new HttpCall(connection, server_.calls_->environment, server_.calls_->pool,
                        server_.live_, std::move(called));
  }

  void OnCall(Connection& connection) override {
    server_.EndWait(std::exchange(open_.at(&connection)->wait, 0));
  }

  void OnResponded(Connection& connection) override {
    OnCall(connection);
    Entry& entry = *open_.at(&connection);
    entry.wait = server_.BeginWait({this, &connection, entry.network});
  }

  void OnClosed(Connection& connection) override {
    OnCall(connection);
    const auto found = open_.find(&connection);
    server_.counts_.Leave(found->second->network);
    --assigned_;
    open_.erase(found);
  }

  std::unique_ptr<Socket> NewSocket(Descriptor socket) const {
    TlsAcceptor* const tls = server_.settings_.tls;
    if (tls != nullptr) return tls->Accept(std::move(socket), TlsProtocol::kHttp1);
    return std::make_unique<PlainSocket>(std::move(socket));
  }

  EventLoop loop_;
  Server& server_;
  std::atomic<int64_t> assigned_{0};
  absl::flat_hash_map<Connection*, std::unique_ptr<Entry>> open_;
};

Server::Server(ServerSettings settings, Serve serve, const Clock& clock, const CallServices* calls,
               ListeningSockets listening)
    : settings_(std::move(settings)),
      serve_(std::move(serve)),
      calls_(calls),
      port_(listening.port),
      counts_(settings_.max_connections, settings_.max_connections_per_address) {
  for (int i = 0; i < settings_.threads; ++i) {
    wires_.push_back(std::make_unique<Wire>(*this, clock));
  }
  for (Descriptor& descriptor : listening.descriptors) {
    acceptors_.push_back(
        std::make_shared<Acceptor>(wires_[0]->loop(), std::move(descriptor),
                                   [this](Descriptor socket, const sockaddr_storage& peer) {
                                     Open(std::move(socket), peer);
                                   }));
    acceptors_.back()->Start();
  }
  for (const auto& wire : wires_) wire->loop().Start();
}

Server::~Server() { Shutdown(std::chrono::nanoseconds(0)); }

absl::StatusOr<std::unique_ptr<Server>> Server::Start(ServerSettings settings, Serve serve,
                                                      const Clock& clock,
                                                      const CallServices* calls) {
  absl::StatusOr<ListeningSockets> listening = ListenOn(settings.address);
  if (!listening.ok()) return listening.status();
  settings.connection.requires_loopback_host =
      calls != nullptr &&
      std::all_of(listening->descriptors.begin(), listening->descriptors.end(), IsLoopback);
  return absl::WrapUnique(
      new Server(std::move(settings), std::move(serve), clock, calls, *std::move(listening)));
}

// Opens a connection on the thread with the fewest.
void Server::Open(Descriptor socket, const sockaddr_storage& peer) {
  const auto has_fewer = [](const auto& a, const auto& b) { return a->assigned() < b->assigned(); };
  const auto& wire = *std::min_element(wires_.begin(), wires_.end(), has_fewer);
  wire->Assign(std::move(socket), peer);
}

int64_t Server::BeginWait(Wait wait) {
  MutexLock lock(mutex_);
  wait.number = next_wait_++;
  waits_.emplace_hint(waits_.end(), wait.number, wait);
  return wait.number;
}

void Server::EndWait(int64_t number) {
  MutexLock lock(mutex_);
  waits_.erase(number);
}

std::optional<Server::Wait> Server::TakeLongestWait(const PeerNetwork& network) {
  const bool only_own = counts_.IsAtLimit(network);
  MutexLock lock(mutex_);
  if (waits_.empty()) return std::nullopt;
  const Wait longest = waits_.begin()->second;
  if (only_own && longest.network != network) return std::nullopt;
  waits_.erase(waits_.begin());
  return longest;
}

void Server::Post(EventLoop::Task task) {
  wires_[next_post_++ % wires_.size()]->loop().Post(std::move(task));
}

void Server::ExportTo(MetricSink& sink) const {
  sink.AddGauge("rapt_http_open_connections", "Open TCP connections to the HTTP address.", {},
                [this] { return counts_.count(); });
  sink.AddCounter("rapt_http_refused_connections_total",
                  "Connections to the HTTP address closed by --max_connections or "
                  "--max_connections_per_address.",
                  {}, [this] { return counts_.refused(); });
}

void Server::OnEveryConnection(void (Connection::*function)()) {
  for (const auto& wire : wires_) {
    std::promise<void> done;
    wire->loop().Post([&wire = *wire, &done, function] {
      wire.OnEvery(function);
      done.set_value();
    });
    done.get_future().wait();
  }
}

void Server::Shutdown(std::chrono::nanoseconds time) {
  if (acceptors_.empty()) return;
  is_stopping_ = true;
  std::promise<void> stopped;
  wires_[0]->loop().Post([this, &stopped] {
    for (const auto& acceptor : acceptors_) acceptor->Stop();
    stopped.set_value();
  });
  stopped.get_future().wait();
  OnEveryConnection(&Connection::Finish);
  live_.WaitUntilNone(time);
  OnEveryConnection(&Connection::Close);
  live_.WaitUntilNone();
  for (const auto& wire : wires_) wire->loop().Stop();
  acceptors_.clear();
}

}  // namespace rapt::http
