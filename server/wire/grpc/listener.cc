#include "server/wire/grpc/listener.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <cstring>
#include <optional>

#include "absl/memory/memory.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/log.h"

namespace rapt {
namespace {

// Counting open connections takes a millisecond, too long to do for every rejected connection.
constexpr std::chrono::milliseconds kForgetInterval{20};

// Pause when the process has no file descriptor left; connections wait meanwhile.
constexpr int kPauseMs = 100;

using Addresses = std::unique_ptr<addrinfo, decltype(&freeaddrinfo)>;

// Resolves the host to all its addresses.
Addresses Resolve(const std::string& host, const std::string& port) {
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  hints.ai_flags = AI_PASSIVE | AI_NUMERICSERV;
  addrinfo* found = nullptr;
  if (getaddrinfo(host.c_str(), port.c_str(), &hints, &found) != 0) found = nullptr;
  return {found, freeaddrinfo};
}

int PortOf(int listening) {
  sockaddr_storage name = {};
  socklen_t size = sizeof(name);
  RAPT_CHECK(getsockname(listening, reinterpret_cast<sockaddr*>(&name), &size) == 0,
             "a bound socket has an address");
  return ntohs(name.ss_family == AF_INET6 ? reinterpret_cast<sockaddr_in6*>(&name)->sin6_port
                                          : reinterpret_cast<sockaddr_in*>(&name)->sin_port);
}

void SetPort(int port, addrinfo& address) {
  const in_port_t number = htons(static_cast<uint16_t>(port));
  if (address.ai_family == AF_INET6) {
    reinterpret_cast<sockaddr_in6*>(address.ai_addr)->sin6_port = number;
  } else {
    reinterpret_cast<sockaddr_in*>(address.ai_addr)->sin_port = number;
  }
}

// Returns -1 with errno set on failure. Connections inherit TCP_NODELAY.
Descriptor ListenOn(const addrinfo& address) {
  Descriptor result(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (result.get() < 0) return result;
  const int on = 1, off = 0;
  setsockopt(result.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  setsockopt(result.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  if (address.ai_family == AF_INET6) {
    setsockopt(result.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (bind(result.get(), address.ai_addr, address.ai_addrlen) == 0 &&
      listen(result.get(), SOMAXCONN) == 0) {
    return result;
  }
  const int error = errno;
  result = Descriptor();
  errno = error;
  return result;
}

// The inode of a descriptor; nullopt if it is closed.
std::optional<ino_t> InodeOf(int descriptor) {
  struct stat status;
  if (fstat(descriptor, &status) != 0) return std::nullopt;
  return status.st_ino;
}

}  // namespace

absl::StatusOr<std::unique_ptr<Listener>> Listener::Bind(const std::string& address,
                                                         int64_t max_connections) {
  auto listener = absl::WrapUnique(new Listener(max_connections));
  if (absl::Status status = listener->Listen(address); !status.ok()) return status;
  return listener;
}

absl::Status Listener::Listen(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  const std::string port = address.substr(colon + 1);
  if (absl::StartsWith(host, "[")) host = host.substr(1, host.size() - 2);
  // As in gRPC's own listener, these mean all addresses of both families.
  if (host == "0.0.0.0") ListenOnAll("::", port);
  if (listening_.empty()) ListenOnAll(host, port);
  if (!listening_.empty()) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(
      "can't listen on ", address, "; the port may be in use, or the address not be local"));
}

// Binds all addresses of the host or none, except address families that this machine lacks.
void Listener::ListenOnAll(const std::string& host, const std::string& port) {
  const Addresses addresses = Resolve(host, port);
  for (addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    if (port_ != 0) SetPort(port_, *address);  // the first address chose a free port
    Descriptor listening = ListenOn(*address);
    if (listening.get() >= 0) {
      port_ = PortOf(listening.get());
      listening_.push_back(std::move(listening));
    } else if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) {
      return listening_.clear();
    }
  }
}

void Listener::Start(std::unique_ptr<Acceptor> acceptor) {
  acceptor_ = std::move(acceptor);
  stop_ = Descriptor(eventfd(0, EFD_CLOEXEC));
  RAPT_CHECK(stop_.get() >= 0, "no event");
  thread_ = std::thread([this] { Run(); });
}

void Listener::Stop() {
  if (!thread_.joinable()) return;
  eventfd_write(stop_.get(), 1);
  thread_.join();
  listening_.clear();
}

void Listener::ExportTo(MetricSink& sink) const {
  sink.AddGauge("rapt_open_connections", "Open TCP connections to the gRPC address.", {},
                [this] { return count(); });
  sink.AddCounter("rapt_refused_connections_total",
                  "Connections closed because --max_connections were open.", {},
                  [this] { return refused(); });
}

int64_t Listener::count() const {
  MutexLock lock(mutex_);
  Forget();
  return static_cast<int64_t>(open_.size());
}

void Listener::Forget() const {
  absl::erase_if(
      open_, [](const auto& connection) { return InodeOf(connection.first) != connection.second; });
}

void Listener::Run() {
  std::vector<pollfd> polled = {{stop_.get(), POLLIN, 0}};
  for (const Descriptor& listening : listening_) polled.push_back({listening.get(), POLLIN, 0});
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
  Descriptor connection(accept4(listening, nullptr, nullptr, SOCK_NONBLOCK | SOCK_CLOEXEC));
  if (connection.get() < 0) {
    if (errno != EMFILE && errno != ENFILE && errno != ENOBUFS && errno != ENOMEM) return true;
    const int error = errno;
    if (const std::optional<int64_t> left_out = accept_errors_.Take()) {
      Log(LogLevel::kWarning, "cannot accept connections",
          {{"reason", std::strerror(error)}, {"left_out", *left_out}});
    }
    return false;
  }
  if (!Enter(connection.get())) {
    ++refused_;
    return true;
  }
  Acceptor::NewConnectionParameters parameters;
  parameters.listener_fd = listening;
  parameters.fd = connection.Release();
  acceptor_->HandleNewConnection(&parameters);
  return true;
}

bool Listener::Enter(int connection) {
  const std::optional<ino_t> inode = InodeOf(connection);
  if (!inode) return false;
  MutexLock lock(mutex_);
  const Instant now = std::chrono::steady_clock::now();
  if (static_cast<int64_t>(open_.size()) >= max_connections_ && now >= next_forget_) {
    Forget();
    next_forget_ = now + kForgetInterval;
  }
  if (static_cast<int64_t>(open_.size()) >= max_connections_) return false;
  open_[connection] = *inode;
  return true;
}

}  // namespace rapt
