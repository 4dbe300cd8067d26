#include "server/wire/connection_counts.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <cstring>

#include "absl/strings/str_cat.h"

namespace rapt {
namespace {

constexpr int64_t kPartOfNetwork = 4;
constexpr size_t kPrefixBytes = 8;  // of a /64

// ::ffff:a.b.c.d
PeerNetwork MappedIpv4(const void* address) {
  PeerNetwork network = {};
  network[10] = network[11] = 0xFF;
  std::memcpy(&network[12], address, 4);
  return network;
}

}  // namespace

PeerNetwork NetworkOf(const sockaddr_storage& peer) {
  PeerNetwork network = {};
  if (peer.ss_family == AF_INET) {
    return MappedIpv4(&reinterpret_cast<const sockaddr_in&>(peer).sin_addr);
  }
  if (peer.ss_family != AF_INET6) return network;
  const in6_addr& address = reinterpret_cast<const sockaddr_in6&>(peer).sin6_addr;
  if (IN6_IS_ADDR_V4MAPPED(&address)) return MappedIpv4(&address.s6_addr[12]);
  std::memcpy(network.data(), &address, kPrefixBytes);
  return network;
}

std::string PeerNameOf(const sockaddr_storage& peer) {
  char text[INET6_ADDRSTRLEN] = {};
  if (peer.ss_family == AF_INET) {
    const auto& name = reinterpret_cast<const sockaddr_in&>(peer);
    inet_ntop(AF_INET, &name.sin_addr, text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(name.sin_port));
  }
  if (peer.ss_family != AF_INET6) return "unix:";
  const auto& name = reinterpret_cast<const sockaddr_in6&>(peer);
  if (IN6_IS_ADDR_V4MAPPED(&name.sin6_addr)) {
    inet_ntop(AF_INET, &name.sin6_addr.s6_addr[12], text, sizeof(text));
    return absl::StrCat("ipv4:", text, ":", ntohs(name.sin6_port));
  }
  inet_ntop(AF_INET6, &name.sin6_addr, text, sizeof(text));
  return absl::StrCat("ipv6:[", text, "]:", ntohs(name.sin6_port));
}

ConnectionCounts::ConnectionCounts(int64_t total, int64_t per_network)
    : total_(total),
      per_network_(per_network > 0 ? per_network : std::max<int64_t>(1, total / kPartOfNetwork)) {}

bool ConnectionCounts::IsAtLimit(const PeerNetwork& network) const {
  const auto own = by_network_.find(network);
  return own != by_network_.end() && own->second >= per_network_;
}

bool ConnectionCounts::IsFullFor(const PeerNetwork& network) const {
  return IsFull() || IsAtLimit(network);
}

bool ConnectionCounts::Enter(const PeerNetwork& network) {
  if (IsFullFor(network)) return false;
  ++count_;
  ++by_network_[network];
  return true;
}

void ConnectionCounts::Leave(const PeerNetwork& network) {
  --count_;
  const auto own = by_network_.find(network);
  if (--own->second == 0) by_network_.erase(own);
}

bool ConnectionCounts::Replace(const PeerNetwork& leaving, const PeerNetwork& arriving) {
  if (leaving != arriving && IsAtLimit(arriving)) return false;
  Leave(leaving);
  ++count_;
  ++by_network_[arriving];
  return true;
}

bool SharedConnectionCounts::Enter(const PeerNetwork& network) {
  MutexLock lock(mutex_);
  const bool has_entered = counts_.Enter(network);
  if (!has_entered) ++refused_;
  return has_entered;
}

SharedConnectionCounts::Entrance SharedConnectionCounts::TryEnter(const PeerNetwork& network) {
  MutexLock lock(mutex_);
  if (counts_.IsFull()) return Entrance::kFull;
  return counts_.Enter(network) ? Entrance::kEntered : Entrance::kAtLimit;
}

void SharedConnectionCounts::Refuse() {
  MutexLock lock(mutex_);
  ++refused_;
}

void SharedConnectionCounts::Leave(const PeerNetwork& network) {
  MutexLock lock(mutex_);
  counts_.Leave(network);
}

bool SharedConnectionCounts::Replace(const PeerNetwork& leaving, const PeerNetwork& arriving) {
  MutexLock lock(mutex_);
  return counts_.Replace(leaving, arriving);
}

int64_t SharedConnectionCounts::count() const {
  MutexLock lock(mutex_);
  return counts_.count();
}

int64_t SharedConnectionCounts::refused() const {
  MutexLock lock(mutex_);
  return refused_;
}

}  // namespace rapt
