#include "server/wire/listening_sockets.h"

#include <netdb.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/socket.h>

#include <cerrno>
#include <memory>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"

namespace rapt {
namespace {

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

// Returns -1 with errno set on failure.
Descriptor Bind(const addrinfo& address) {
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

// Binds all addresses of the host or none, except address families that this machine lacks.
ListeningSockets BindAll(const std::string& host, const std::string& port) {
  ListeningSockets bound;
  const Addresses addresses = Resolve(host, port);
  for (addrinfo* address = addresses.get(); address != nullptr; address = address->ai_next) {
    if (bound.port != 0) SetPort(bound.port, *address);  // the first address chose a free port
    Descriptor listening = Bind(*address);
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

absl::StatusOr<ListeningSockets> ListenOn(const std::string& address) {
  const size_t colon = address.rfind(':');
  std::string host = address.substr(0, colon);
  const std::string port = address.substr(colon + 1);
  if (absl::StartsWith(host, "[")) host = host.substr(1, host.size() - 2);
  ListeningSockets bound;
  if (host == "0.0.0.0") bound = BindAll("::", port);
  if (bound.descriptors.empty()) bound = BindAll(host, port);
  if (!bound.descriptors.empty()) return bound;
  return absl::UnavailableError(absl::StrCat(
      "can't listen on ", address, "; the port may be in use, or the address may not be local"));
}

bool IsShortage(int accept_error) {
  return accept_error == EMFILE || accept_error == ENFILE || accept_error == ENOBUFS ||
         accept_error == ENOMEM;
}

}  // namespace rapt
