#include "server/wire/listening_sockets.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/host_port.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

constexpr int kAttempts = 16;

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

in_port_t& PortIn(sockaddr& address) {
  return address.sa_family == AF_INET6 ? reinterpret_cast<sockaddr_in6&>(address).sin6_port
                                       : reinterpret_cast<sockaddr_in&>(address).sin_port;
}

int PortOf(int listening) {
  sockaddr_storage name = {};
  socklen_t size = sizeof(name);
  RAPT_CHECK(getsockname(listening, reinterpret_cast<sockaddr*>(&name), &size) == 0,
             "a bound socket has an address");
  return ntohs(PortIn(reinterpret_cast<sockaddr&>(name)));
}

// Uses `port` unless it is 0. Returns -1 with errno set on failure.
Descriptor Bind(const addrinfo& address, int port) {
  sockaddr_storage name = {};
  std::memcpy(&name, address.ai_addr, address.ai_addrlen);
  auto& generic = reinterpret_cast<sockaddr&>(name);
  if (port != 0) PortIn(generic) = htons(static_cast<uint16_t>(port));
  Descriptor result(::socket(address.ai_family, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  if (result.get() < 0) return result;
  const int on = 1, off = 0;
  setsockopt(result.get(), SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
  setsockopt(result.get(), IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
  if (address.ai_family == AF_INET6) {
    setsockopt(result.get(), IPPROTO_IPV6, IPV6_V6ONLY, &off, sizeof(off));
  }
  if (bind(result.get(), &generic, address.ai_addrlen) == 0 &&
      listen(result.get(), SOMAXCONN) == 0) {
    return result;
  }
  const int error = errno;
  result = Descriptor();
  errno = error;
  return result;
}

// Returns no sockets with errno set on failure.
ListeningSockets BindAll(const addrinfo* addresses) {
  ListeningSockets bound;
  for (const addrinfo* address = addresses; address != nullptr; address = address->ai_next) {
    Descriptor listening = Bind(*address, bound.port);  // the first address chose a free port
    if (listening.get() >= 0) {
      bound.port = PortOf(listening.get());
      bound.descriptors.push_back(std::move(listening));
    } else if (errno != EADDRNOTAVAIL && errno != EAFNOSUPPORT) {
      return {};
    }
  }
  return bound;
}

// Connects to the socket. Returns 0 or an errno.
int TryToConnect(const sockaddr_un& name) {
  const Descriptor descriptor(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
  if (descriptor.get() < 0) return errno;
  const auto* const address = reinterpret_cast<const sockaddr*>(&name);
  return connect(descriptor.get(), address, sizeof(name)) == 0 ? 0 : errno;
}

// REQUIRES: the path fits.
sockaddr_un NameOf(const std::string& path) {
  sockaddr_un name = {};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.c_str(), path.size());
  return name;
}

// Sets the mode of sockets bound during its lifetime.
class ScopedFileMode {
 public:
  explicit ScopedFileMode(int mode) : previous_(umask(~static_cast<mode_t>(mode) & 0777)) {}
  ~ScopedFileMode() { umask(previous_); }
  ScopedFileMode(const ScopedFileMode&) = delete;
  ScopedFileMode& operator=(const ScopedFileMode&) = delete;

 private:
  const mode_t previous_;
};

// Removes the stale socket of a dead server.
absl::Status MakeRoomForSocket(const std::string& path) {
  if (path.size() >= sizeof(sockaddr_un::sun_path)) {
    return Invalid("--unix_socket has ", path.size(), " bytes; a socket's path has at most ",
                   sizeof(sockaddr_un::sun_path) - 1);
  }
  struct stat status;
  if (lstat(path.c_str(), &status) != 0) return absl::OkStatus();  // binding reports other errors
  if (!S_ISSOCK(status.st_mode)) {
    return absl::UnavailableError(absl::StrCat("can't listen on ", path, "; it is not a socket"));
  }
  if (TryToConnect(NameOf(path)) != ECONNREFUSED) {
    return absl::UnavailableError(
        absl::StrCat("can't listen on ", path, "; another server may be using it"));
  }
  if (unlink(path.c_str()) == 0) return absl::OkStatus();
  return absl::UnavailableError(
      absl::StrCat("can't listen on ", path, "; the existing socket can't be removed"));
}

}  // namespace

ListeningSockets ListenOnAll(const addrinfo* addresses) {
  ListeningSockets bound;
  // The port that is free on the first address may be in use on another one.
  for (int attempt = 0; attempt < kAttempts && bound.descriptors.empty(); ++attempt) {
    bound = BindAll(addresses);
    if (bound.descriptors.empty() && errno != EADDRINUSE) break;
  }
  return bound;
}

absl::StatusOr<ListeningSockets> ListenOn(const std::string& address) {
  const HostPort parts = ParseHostPort(address).value();
  ListeningSockets bound;
  if (parts.host == "0.0.0.0") bound = ListenOnAll(Resolve("::", parts.service()).get());
  if (bound.descriptors.empty()) bound = ListenOnAll(Resolve(parts.node(), parts.service()).get());
  if (!bound.descriptors.empty()) return bound;
  return absl::UnavailableError(absl::StrCat(
      "can't listen on ", address, "; the port may be in use, or the address may not be local"));
}

bool IsShortage(int accept_error) {
  return accept_error == EMFILE || accept_error == ENFILE || accept_error == ENOBUFS ||
         accept_error == ENOMEM;
}

absl::StatusOr<Descriptor> ListenOnUnix(const std::string& path, int mode) {
  RAPT_RETURN_IF_ERROR(MakeRoomForSocket(path));
  Descriptor result(socket(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0));
  const sockaddr_un name = NameOf(path);
  const ScopedFileMode file_mode(mode);
  if (result.get() < 0 ||
      bind(result.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name)) != 0 ||
      listen(result.get(), SOMAXCONN) != 0) {
    return absl::UnavailableError(absl::StrCat(
        "can't listen on ", path, "; its directory may not exist or may not be writable"));
  }
  return result;
}

}  // namespace rapt
