#include "server/wire/http/server.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <exception>
#include <future>
#include <list>
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
  // Connections, open or to be opened. Thread-safe, as the next ones.
  int64_t assigned() const { return assigned_; }
  // Those that have no call.
  int64_t replaceable() const { return replaceable_; }
  void Assign() { ++assigned_; }

  void Open(Descriptor socket, const sockaddr_storage& peer) {
    const PeerNetwork network = NetworkOf(peer);
    if (server_.counts_.IsFull() && MayReplace(network)) waiting_.front()->Close();
    if (!server_.counts_.Enter(network)) {
      --assigned_;
      return;
    }
    const auto connection =
        std::make_shared<Connection>(loop_, NewSocket(std::move(socket)), PeerNameOf(peer), *this);
    waiting_.push_back(connection.get());
    replaceable_ = static_cast<int64_t>(waiting_.size());
    open_.emplace(connection.get(), std::unique_ptr<Entry>(new Entry{
                                        network, std::prev(waiting_.end()), true, server_.live_}));
    connection->Start(network);
  }

  void OnEvery(void (Connection::*function)()) {
    std::vector<std::shared_ptr<Connection>> all;  // a connection may remove itself
    for (const auto& [connection, entry] : open_) all.push_back(connection->shared_from_this());
    for (const auto& connection : all) (connection.get()->*function)();
  }

 private:
  struct Entry {
    PeerNetwork network;
    std::list<Connection*>::iterator place;  // among those that wait
    bool waits;
    LiveCount& live;
    LiveCount::Place live_place{live};
  };

  // Returns whether a new connection may enter in place of the one that has waited longest.
  bool MayReplace(const PeerNetwork& network) const {
    if (waiting_.empty()) return false;
    return !server_.counts_.IsAtLimit(network) || open_.at(waiting_.front())->network == network;
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
    Entry& entry = *open_.at(&connection);
    if (std::exchange(entry.waits, false)) waiting_.erase(entry.place);
    replaceable_ = static_cast<int64_t>(waiting_.size());
  }

  void OnResponded(Connection& connection) override {
    OnCall(connection);
    Entry& entry = *open_.at(&connection);
    entry.waits = true;
    entry.place = waiting_.insert(waiting_.end(), &connection);
    replaceable_ = static_cast<int64_t>(waiting_.size());
  }

  void OnClosed(Connection& connection) override {
    OnCall(connection);
    const auto found = open_.find(&connection);
    server_.counts_.Leave(found->second->network);
    --assigned_;
    open_.erase(found);
  }

  std::unique_ptr<Socket> NewSocket(Descriptor socket) {
    TlsAcceptor* const tls = server_.settings_.tls;
    if (tls != nullptr) return tls->Accept(std::move(socket), TlsProtocol::kHttp1);
    return std::make_unique<PlainSocket>(std::move(socket));
  }

  EventLoop loop_;
  Server& server_;
  std::atomic<int64_t> assigned_{0}, replaceable_{0};
  absl::flat_hash_map<Connection*, std::unique_ptr<Entry>> open_;
  std::list<Connection*> waiting_;  // without a call, by their last response or their beginning
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

// Assigns a connection to the thread with the fewest. If the server is full, it replaces one of its
// thread's: then to the one with the most that can be replaced.
Server::Wire& Server::WireForNext() {
  const bool is_full = counts_.IsFull();
  const auto is_better = [is_full](const auto& a, const auto& b) {
    return is_full ? a->replaceable() > b->replaceable() : a->assigned() < b->assigned();
  };
  return **std::min_element(wires_.begin(), wires_.end(), is_better);
}

void Server::Open(Descriptor socket, const sockaddr_storage& peer) {
  Wire& wire = WireForNext();
  wire.Assign();
  wire.loop().Run(
      [&wire, peer, socket = std::move(socket)]() mutable { wire.Open(std::move(socket), peer); });
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
