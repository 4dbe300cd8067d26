#include "bench/attack.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/string_view.h"
#include "base/check.h"
#include "base/descriptor.h"
#include "tests/support/raw_http2.h"

namespace rapt::bench {
namespace {

using Clock = std::chrono::steady_clock;

constexpr std::chrono::milliseconds kTick{10};
constexpr size_t kSentAtOnce = 64 * 1024;
constexpr int kSendBuffer = 64 * 1024;
constexpr size_t kReadAtOnce = 1024 * 1024;

sockaddr_in Name(const char* address, int port) {
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_port = htons(static_cast<uint16_t>(port));
  RAPT_CHECK(inet_pton(AF_INET, address, &name.sin_addr) == 1, "not an address");
  return name;
}

// Returns a socket that connects to the port.
Descriptor Connecting(const char* address, int port) {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  RAPT_CHECK(socket.get() >= 0, "no descriptor is left");
  // Closed by a reset. Otherwise the attacker runs out of ports, which wait for a minute.
  const linger reset = {1, 0};
  setsockopt(socket.get(), SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
  // What waits here when the server ends the connection costs only the attacker.
  setsockopt(socket.get(), SOL_SOCKET, SO_SNDBUF, &kSendBuffer, sizeof(kSendBuffer));
  // The port is chosen by connect(), which knows that the same one may have several peers.
  const int yes = 1;
  setsockopt(socket.get(), IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, &yes, sizeof(yes));
  const sockaddr_in from = Name(address, 0), to = Name("127.0.0.1", port);
  RAPT_CHECK(bind(socket.get(), reinterpret_cast<const sockaddr*>(&from), sizeof(from)) == 0,
             "the attacker's address cannot be used");
  const int error = connect(socket.get(), reinterpret_cast<const sockaddr*>(&to), sizeof(to));
  RAPT_CHECK(error == 0 || errno != EADDRNOTAVAIL, "the attacker has no port left");
  return socket;
}

int64_t FramesIn(absl::string_view bytes) {
  constexpr size_t kHead = 9;
  if (absl::StartsWith(bytes, NGHTTP2_CLIENT_MAGIC)) {
    bytes.remove_prefix(NGHTTP2_CLIENT_MAGIC_LEN);
  }
  int64_t frames = 0;
  for (; bytes.size() >= kHead; ++frames) {
    const auto byte = [&bytes](size_t i) { return static_cast<uint8_t>(bytes[i]); };
    const size_t payload = size_t{byte(0)} << 16 | size_t{byte(1)} << 8 | byte(2);
    bytes.remove_prefix(std::min(bytes.size(), kHead + payload));
  }
  return frames;
}

// The connections of an attack. Belongs to one thread.
class Attacker {
 public:
  Attacker(const Flood& flood, int port, Attack::Reached& reached)
      : flood_(flood), port_(port), reached_(reached), peers_(flood.connections) {
    RAPT_CHECK(epoll_.get() >= 0, "no epoll");
  }

  void Run(const std::atomic<bool>& stopping) {
    for (Peer& peer : peers_) Open(peer);
    while (!stopping) {
      Wait();
      Tick();
    }
    for (Peer& peer : peers_) Close(peer);
  }

 private:
  struct Peer {
    Descriptor socket;
    size_t sent = 0;
    Clock::time_point due = Clock::time_point::max();  // of OnDue()
  };

  void Open(Peer& peer) {
    peer.due = Clock::time_point::max();
    peer.sent = 0;
    peer.socket = Connecting(flood_.from, port_);
    Watch(peer, EPOLL_CTL_ADD, EPOLLOUT);
  }

  void Close(Peer& peer) {
    if (peer.socket.get() < 0) return;
    peer.socket = Descriptor();
    Count(peer);
  }

  void Watch(Peer& peer, int operation, uint32_t events) {
    epoll_event event = {};
    event.events = events | EPOLLRDHUP;
    if (flood_.reads) event.events |= EPOLLIN;
    event.data.ptr = &peer;
    epoll_ctl(epoll_.get(), operation, peer.socket.get(), &event);
  }

  void Wait() {
    std::array<epoll_event, 128> events;
    const int count = epoll_wait(epoll_.get(), events.data(), static_cast<int>(events.size()),
                                 static_cast<int>(kTick.count()));
    for (int i = 0; i < count; ++i) {
      const epoll_event& event = events[static_cast<size_t>(i)];
      OnEvents(*static_cast<Peer*>(event.data.ptr), event.events);
    }
  }

  void OnEvents(Peer& peer, uint32_t events) {
    if ((events & (EPOLLRDHUP | EPOLLHUP | EPOLLERR)) != 0) return OnEnded(peer);
    // MSG_TRUNC discards the bytes without a copy.
    if ((events & EPOLLIN) != 0) recv(peer.socket.get(), nullptr, kReadAtOnce, MSG_TRUNC);
    if ((events & EPOLLOUT) != 0) Send(peer);
  }

  void OnEnded(Peer& peer) {
    ++reached_.ended;
    Close(peer);
    if (flood_.pause.count() == 0) return Open(peer);
    peer.due = Clock::now() + flood_.pause;
  }

  bool IsPaced(const Peer& peer) const {
    return flood_.pace.count() > 0 && peer.sent >= flood_.once.size();
  }

  // Returns the bytes to send next.
  absl::string_view Next(const Peer& peer) const {
    if (peer.sent < flood_.once.size()) return absl::string_view(flood_.once).substr(peer.sent);
    if (flood_.repeated.empty()) return {};
    const size_t offset = (peer.sent - flood_.once.size()) % flood_.repeated.size();
    return absl::string_view(flood_.repeated).substr(offset, IsPaced(peer) ? 1 : kSentAtOnce);
  }

  void Send(Peer& peer) {
    const absl::string_view bytes = Next(peer).substr(0, kSentAtOnce);
    const ssize_t sent = send(peer.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
    if (sent > 0) peer.sent += static_cast<size_t>(sent);
    if (Next(peer).empty()) {
      Watch(peer, EPOLL_CTL_MOD, 0);
      if (flood_.keep.count() > 0) peer.due = Clock::now() + flood_.keep;
    } else if (IsPaced(peer)) {
      Watch(peer, EPOLL_CTL_MOD, 0);
      peer.due = Clock::now() + flood_.pace;
    }
  }

  void Tick() {
    const auto now = Clock::now();
    if (now < next_tick_) return;
    next_tick_ = now + kTick;
    for (Peer& peer : peers_) {
      if (peer.due <= now) OnDue(peer);
    }
  }

  void OnDue(Peer& peer) {
    peer.due = Clock::time_point::max();
    if (peer.socket.get() >= 0 && !Next(peer).empty()) return Send(peer);
    Close(peer);
    Open(peer);
  }

  void Count(const Peer& peer) {
    const size_t once = std::min(peer.sent, flood_.once.size()), more = peer.sent - once;
    reached_.bytes += static_cast<int64_t>(peer.sent);
    if (flood_.is_http) return;
    reached_.frames += FramesIn(absl::string_view(flood_.once).substr(0, once));
    if (more == 0) return;
    const size_t period = flood_.repeated.size();
    reached_.frames += static_cast<int64_t>(more / period) * frames_repeated_ +
                       FramesIn(absl::string_view(flood_.repeated).substr(0, more % period));
  }

  const Flood& flood_;
  const int port_;
  Attack::Reached& reached_;
  const int64_t frames_repeated_ = flood_.is_http ? 0 : FramesIn(flood_.repeated);
  const Descriptor epoll_{epoll_create1(EPOLL_CLOEXEC)};
  std::vector<Peer> peers_;
  Clock::time_point next_tick_ = Clock::now();
};

}  // namespace

Attack::Attack(const Flood& flood, int port)
    : thread_([this, &flood, port] {
        setpriority(PRIO_PROCESS, static_cast<id_t>(gettid()), kNice);
        Attacker(flood, port, reached_).Run(stopping_);
      }) {}

Attack::Reached Attack::Stop() {
  stopping_ = true;
  if (thread_.joinable()) thread_.join();
  return reached_;
}

}  // namespace rapt::bench
