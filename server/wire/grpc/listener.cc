#include "server/wire/grpc/listener.h"

#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <limits>
#include <optional>

#include "absl/memory/memory.h"
#include "base/check.h"
#include "base/log.h"
#include "server/wire/unix_socket.h"

namespace rapt {
namespace {

// Counting open connections takes a millisecond, too long to do for every rejected connection.
constexpr std::chrono::milliseconds kForgetInterval{20};

// Pause when the process has no file descriptor left; connections wait meanwhile.
constexpr int kPauseMs = 100;

constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

// The inode of a descriptor; nullopt if it is closed.
std::optional<ino_t> InodeOf(int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) return std::nullopt;
  return status.st_ino;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(const std::string& address,
                                                         const ConnectionCounts& limits) {
  absl::StatusOr<ListeningSockets> listening = ListenOn(address);
  if (!listening.ok()) return listening.status();
  return absl::WrapUnique(new Listener(*std::move(listening), limits));
}

absl::StatusOr<std::unique_ptr<Listener>> Listener::BindUnix(const std::string& path, int mode) {
  absl::StatusOr<Descriptor> listening = ListenOnUnix(path, mode);
  if (!listening.ok()) return listening.status();
  ListeningSockets sockets;
  sockets.descriptors.push_back(*std::move(listening));
  auto listener =
      absl::WrapUnique(new Listener(std::move(sockets), ConnectionCounts(kUnlimited, kUnlimited)));
  listener->socket_path_ = path;
  return listener;
}

void Listener::Start(std::unique_ptr<Acceptor> acceptor) {
  acceptor_ = std::move(acceptor);
  stop_ = Descriptor(eventfd(0, EFD_CLOEXEC));
  RAPT_CHECK(stop_.get() >= 0, "no event");
  thread_ = std::thread([this] { Run(); });
}

void Listener::Stop() {
  if (thread_.joinable()) {
    eventfd_write(stop_.get(), 1);
    thread_.join();
  }
  listening_.descriptors.clear();
  if (!socket_path_.empty()) unlink(socket_path_.c_str());
  socket_path_.clear();
}

void Listener::ExportTo(MetricSink& sink) const {
  sink.AddGauge("rapt_open_connections", "Open TCP connections to the gRPC address.", {},
                [this] { return count(); });
  sink.AddCounter("rapt_refused_connections_total",
                  "Connections closed by --max_connections or --max_connections_per_address.", {},
                  [this] { return refused(); });
}

int64_t Listener::count() const {
  MutexLock lock(mutex_);
  Forget();
  return counts_.count();
}

void Listener::Forget() const {
  absl::erase_if(open_, [this](const auto& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_) {
    const auto& [descriptor, connection] = entry;
    if (InodeOf(descriptor) == connection.inode) return false;
    counts_.Leave(connection.network);
    return true;
  });
}

void Listener::Run() {
  std::vector<pollfd> polled = {{stop_.get(), POLLIN, 0}};
  for (const Descriptor& listening : listening_.descriptors) {
    polled.push_back({listening.get(), POLLIN, 0});
  }
  for (;;) {
    if (poll(polled.data(), polled.size(), -1) < 0) continue;  // a signal
    if (polled[0].revents != 0) return;
    for (size_t i = 1; i < polled.size(); ++i) {
      if (polled[i].revents == 0 || TakeFrom(polled[i].fd)) continue;
      poll(polled.data(), 1, kPauseMs);
    }
  }
}

// Returns false if retrying at once would fail again.
bool Listener::TakeFrom(int listening) {
  sockaddr_storage peer = {};
  socklen_t peer_size = sizeof(peer);
  Descriptor connection(accept4(listening, reinterpret_cast<sockaddr*>(&peer), &peer_size,
                                SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection.get() < 0) {
    if (!IsShortage(errno)) return true;
    const int error = errno;
    if (const std::optional<int64_t> left_out = accept_errors_.Take()) {
      Log(LogLevel::kWarning, "cannot accept connections",
          {{"reason", std::strerror(error)}, {"left_out", *left_out}});
    }
    return false;
  }
  if (!Enter(connection.get(), NetworkOf(peer))) {
    ++refused_;
    return true;
  }
  Acceptor::NewConnectionParameters parameters;
  parameters.listener_fd = listening;
  parameters.fd = connection.Release();
  acceptor_->HandleNewConnection(&parameters);
  return true;
}

bool Listener::Enter(int connection, const PeerNetwork& network) {
  const std::optional<ino_t> inode = InodeOf(connection);
  if (!inode) return false;
  MutexLock lock(mutex_);
  const auto known = open_.find(connection);
  if (known != open_.end()) {  // gRPC has closed the descriptor since
    counts_.Leave(known->second.network);
    open_.erase(known);
  }
  const Instant now = clock_.Now();
  if (counts_.IsFullFor(network) && now >= next_forget_) {
    Forget();
    next_forget_ = now + kForgetInterval;
  }
  if (!counts_.Enter(network)) return false;
  open_[connection] = {*inode, network};
  return true;
}

}  // namespace rapt
