#include "server/wire/http/server.h"

#include <sys/socket.h>

#include <algorithm>
#include <exception>
#include <future>
#include <map>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/memory/memory.h"
#include "base/check.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "server/wire/connection_counts.h"
#include "server/wire/http/http_call.h"
#include "server/wire/socket.h"
#include "server/wire/tls_socket.h"

namespace rapt::http {

// A connection, which only its thread touches.
struct Server::Entry {
  Entry(Connection* connection, Wire* wire, const PeerNetwork& network, LiveCount& live)
      : connection(connection), wire(wire), network(network), live_place(live) {}

  Connection* const connection;
  Wire* const wire;
  const PeerNetwork network;
  const LiveCount::Place live_place;
  std::optional<int64_t> wait;  // its number; none during a call
  int64_t held_bytes = 0;       // of a response without a call, until it is sent
  bool is_counted = true;
};

// The connections of all threads that wait for a request, or for their client to read a response
// without a call. Thread-safe.
class Server::Waits {
 public:
  // Begins the wait of a connection, or begins it again.
  void Begin(Entry& entry) {
    MutexLock lock(mutex_);
    Erase(entry);
    entry.wait = next_++;
    by_network_[entry.network].emplace(*entry.wait, &entry);
  }

  void End(Entry& entry) {
    MutexLock lock(mutex_);
    Erase(entry);
  }

  struct First {
    Wire* wire = nullptr;  // null: none waits
    Entry* entry = nullptr;
  };

  // Returns the longest wait of the network with most waiting connections; of several such
  // networks, the longest of all. So a flood of connections replaces its own.
  First FirstToClose() const {
    MutexLock lock(mutex_);
    const auto goes_first = [](const auto& a, const auto& b) {
      if (a.second.size() != b.second.size()) return a.second.size() > b.second.size();
      return a.second.begin()->first < b.second.begin()->first;
    };
    const auto first = std::min_element(by_network_.begin(), by_network_.end(), goes_first);
    if (first == by_network_.end()) return {};
    Entry* const entry = first->second.begin()->second;
    return {entry->wire, entry};
  }

 private:
  void Erase(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    if (!entry.wait) return;
    const auto own = by_network_.find(entry.network);
    own->second.erase(*entry.wait);
    if (own->second.empty()) by_network_.erase(own);
    entry.wait.reset();
  }

  mutable Mutex mutex_;
  int64_t next_ ABSL_GUARDED_BY(mutex_) = 0;
  // By the numbers of their waits, the longest first.
  absl::flat_hash_map<PeerNetwork, std::map<int64_t, Entry*>> by_network_ ABSL_GUARDED_BY(mutex_);
};

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
    const Waits::First first =
        entrance == Entrance::kFull ? server_.waits_->FirstToClose() : Waits::First();
    if (first.wire == nullptr) return server_.counts_.Refuse();
    if (first.wire != this) return first.wire->Assign(std::move(socket), peer);
    Entry& replaced = *first.entry;
    // The counts change at once, so that no third connection takes the place. False if the network
    // is at its limit.
    if (!server_.counts_.Replace(replaced.network, network)) return server_.counts_.Refuse();
    replaced.is_counted = false;
    const auto closed = replaced.connection->shared_from_this();
    // The new one waits before the other one ends: in between, other threads would find fewer
    // connections of a flood than there are, and close those of others.
    Begin(std::move(socket), peer, network);
    closed->Close();
  }

  // The connection is counted.
  void Begin(Descriptor socket, const sockaddr_storage& peer, const PeerNetwork& network) {
    const auto connection =
        std::make_shared<Connection>(loop_, NewSocket(std::move(socket)), PeerNameOf(peer), *this);
    auto& entry = open_[connection.get()];
    entry = std::make_unique<Entry>(connection.get(), this, network, server_.live_);
    server_.waits_->Begin(*entry);
    ++assigned_;
    connection->Start(network);
  }

  const ConnectionSettings& settings() const override { return server_.settings_.connection; }
  bool is_draining() const override { return server_.is_draining_; }
  Served Serve(const Request& request) override { return server_.serve_(request); }

  ConnectionCall* NewCall(Connection& connection, CalledMethod called) override {
    RAPT_CHECK(server_.calls_ != nullptr, "this server has no calls");
    return new HttpCall(connection, server_.calls_->environment, server_.calls_->pool,
                        server_.live_, std::move(called));
  }

  void OnCall(Connection& connection) override { server_.waits_->End(*open_.at(&connection)); }

  void OnHolding(Connection& connection, int64_t bytes) override {
    Entry& entry = *open_.at(&connection);
    Hold(entry, bytes);
    while (held_bytes_ > server_.settings_.max_held_bytes) {
      Entry* const first = FirstToRelease(entry);
      if (first == nullptr) return;
      first->connection->Close();
    }
  }

  // Of the network that holds the most, the connection that has waited longest. Null if none but
  // `responding` holds bytes.
  Entry* FirstToRelease(const Entry& responding) const {
    absl::flat_hash_map<PeerNetwork, int64_t> held;
    for (const auto& [connection, entry] : open_) held[entry->network] += entry->held_bytes;
    const auto goes_first = [&held](const Entry& a, const Entry& b) {
      return std::pair(-held[a.network], a.wait) < std::pair(-held[b.network], b.wait);
    };
    Entry* first = nullptr;
    for (const auto& [connection, entry] : open_) {
      if (entry->held_bytes == 0 || entry.get() == &responding) continue;
      if (first == nullptr || goes_first(*entry, *first)) first = entry.get();
    }
    return first;
  }

  void Hold(Entry& entry, int64_t bytes) {
    held_bytes_ += bytes - entry.held_bytes;
    entry.held_bytes = bytes;
  }

  void OnResponded(Connection& connection) override {
    Entry& entry = *open_.at(&connection);
    Hold(entry, 0);
    server_.waits_->Begin(entry);
  }

  void OnClosed(Connection& connection) override {
    const auto found = open_.find(&connection);
    Entry& entry = *found->second;
    if (entry.is_counted) server_.counts_.Leave(entry.network);
    Hold(entry, 0);
    server_.waits_->End(entry);
    open_.erase(found);
    --assigned_;
  }

  std::unique_ptr<Socket> NewSocket(Descriptor socket) const {
    TlsAcceptor* const tls = server_.settings_.tls;
    if (tls != nullptr) return tls->Accept(std::move(socket), TlsProtocol::kHttp1);
    return std::make_unique<PlainSocket>(std::move(socket));
  }

  EventLoop loop_;
  Server& server_;
  std::atomic<int64_t> assigned_{0};
  int64_t held_bytes_ = 0;  // of all connections
  absl::flat_hash_map<Connection*, std::unique_ptr<Entry>> open_;
};

Server::Server(ServerSettings settings, Serve serve, const Clock& clock, const CallServices* calls,
               ListeningSockets listening)
    : settings_(std::move(settings)),
      serve_(std::move(serve)),
      calls_(calls),
      port_(listening.port),
      counts_(settings_.max_connections, settings_.max_connections_per_address),
      waits_(std::make_unique<Waits>()) {
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
  RAPT_ASSIGN_OR_RETURN(ListeningSockets listening, ListenOn(settings.address));
  return absl::WrapUnique(
      new Server(std::move(settings), std::move(serve), clock, calls, std::move(listening)));
}

// Opens a connection on the thread with the fewest.
void Server::Open(Descriptor socket, const sockaddr_storage& peer) {
  const auto has_fewer = [](const auto& a, const auto& b) { return a->assigned() < b->assigned(); };
  const auto& wire = *std::min_element(wires_.begin(), wires_.end(), has_fewer);
  wire->Assign(std::move(socket), peer);
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
