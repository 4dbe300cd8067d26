#include "server/wire/http/server.h"

#include <netinet/in.h>
#include <sys/socket.h>

#include <algorithm>
#include <exception>
#include <future>
#include <iterator>
#include <limits>
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

  // The number of the wait of the connection that has waited longest for a request; kNone: none
  // waits. Thread-safe.
  int64_t longest_wait() const { return longest_wait_.load(std::memory_order_relaxed); }

  static constexpr int64_t kNone = std::numeric_limits<int64_t>::max();

 private:
  using Entrance = SharedConnectionCounts::Entrance;

  struct Entry {
    Entry(Connection* connection, const PeerNetwork& network, LiveCount& live)
        : connection(connection), network(network), live_place(live) {}

    Connection* const connection;
    const PeerNetwork network;
    const LiveCount::Place live_place;
    int64_t wait = kNone;  // its number; kNone during a call
    bool is_counted = true;
  };
  using Entries = std::list<Entry>;

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
    Wire* const wire = entrance == Entrance::kFull ? server_.LongestWaiting() : nullptr;
    if (wire == nullptr) return server_.counts_.Refuse();
    if (wire != this) return wire->Assign(std::move(socket), peer);
    if (!CloseLongestWaiting(network)) return server_.counts_.Refuse();
    Begin(std::move(socket), peer, network);
  }

  // Closes the connection that has waited longest, whose place then belongs to a new one of the
  // network. The counts change at once, so that no third connection takes the place. Returns false,
  // and closes none, if the network is at its limit. REQUIRES: a connection of this thread waits.
  bool CloseLongestWaiting(const PeerNetwork& network) {
    Entry& longest = waiting_.front();
    if (!server_.counts_.Replace(longest.network, network)) return false;
    longest.is_counted = false;
    longest.connection->Close();
    return true;
  }

  // The connection is counted.
  void Begin(Descriptor socket, const sockaddr_storage& peer, const PeerNetwork& network) {
    const auto connection =
        std::make_shared<Connection>(loop_, NewSocket(std::move(socket)), PeerNameOf(peer), *this);
    called_.emplace_back(connection.get(), network, server_.live_);
    const auto entry = std::prev(called_.end());
    open_.emplace(connection.get(), entry);
    BeginWait(entry);
    ++assigned_;
    connection->Start(network);
  }

  // Begins the wait of a connection, or begins it again.
  void BeginWait(Entries::iterator entry) {
    waiting_.splice(waiting_.end(), entry->wait == kNone ? called_ : waiting_, entry);
    entry->wait = server_.next_wait_.fetch_add(1, std::memory_order_relaxed);
    PublishLongestWait();
  }

  void PublishLongestWait() {
    const int64_t longest = waiting_.empty() ? kNone : waiting_.front().wait;
    longest_wait_.store(longest, std::memory_order_relaxed);
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
    const auto entry = open_.at(&connection);
    called_.splice(called_.end(), waiting_, entry);
    entry->wait = kNone;
    PublishLongestWait();
  }

  void OnResponded(Connection& connection) override { BeginWait(open_.at(&connection)); }

  void OnClosed(Connection& connection) override {
    const auto found = open_.find(&connection);
    const auto entry = found->second;
    if (entry->is_counted) server_.counts_.Leave(entry->network);
    open_.erase(found);
    (entry->wait == kNone ? called_ : waiting_).erase(entry);
    PublishLongestWait();
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
  std::atomic<int64_t> longest_wait_{kNone};
  Entries waiting_;  // for a request, the longest first
  Entries called_;   // with a call
  absl::flat_hash_map<Connection*, Entries::iterator> open_;
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

Server::Wire* Server::LongestWaiting() const {
  const auto has_longer = [](const auto& a, const auto& b) {
    return a->longest_wait() < b->longest_wait();
  };
  Wire* const wire = std::min_element(wires_.begin(), wires_.end(), has_longer)->get();
  return wire->longest_wait() == Wire::kNone ? nullptr : wire;
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
