#include "server/wire/listening_sockets.h"

#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <memory>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/host_port.h"

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

}  // namespace rapt
