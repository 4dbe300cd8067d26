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

SharedConnectionCounts::SharedConnectionCounts(int64_t total, int64_t per_network)
    : total_(total),
      per_network_(per_network > 0 ? per_network : std::max<int64_t>(1, total / kPartOfNetwork)) {}

bool SharedConnectionCounts::IsAtLimit(const PeerNetwork& network) const {
  const auto own = by_network_.find(network);
  return own != by_network_.end() && own->second >= per_network_;
}

void SharedConnectionCounts::Add(const PeerNetwork& network) {
  ++count_;
  ++by_network_[network];
}

void SharedConnectionCounts::Remove(const PeerNetwork& network) {
  --count_;
  const auto own = by_network_.find(network);
  if (--own->second == 0) by_network_.erase(own);
}

bool SharedConnectionCounts::Enter(const PeerNetwork& network) {
  if (TryEnter(network) == Entrance::kEntered) return true;
  Refuse();
  return false;
}

SharedConnectionCounts::Entrance SharedConnectionCounts::TryEnter(const PeerNetwork& network) {
  MutexLock lock(mutex_);
  if (count_ >= total_) return Entrance::kFull;
  if (IsAtLimit(network)) return Entrance::kAtLimit;
  Add(network);
  return Entrance::kEntered;
}

void SharedConnectionCounts::Refuse() {
  MutexLock lock(mutex_);
  ++refused_;
}

void SharedConnectionCounts::Leave(const PeerNetwork& network) {
  MutexLock lock(mutex_);
  Remove(network);
}

bool SharedConnectionCounts::Replace(const PeerNetwork& leaving, const PeerNetwork& arriving) {
  MutexLock lock(mutex_);
  if (leaving != arriving && IsAtLimit(arriving)) return false;
  Remove(leaving);
  Add(arriving);
  return true;
}

int64_t SharedConnectionCounts::count() const {
  MutexLock lock(mutex_);
  return count_;
}

int64_t SharedConnectionCounts::refused() const {
  MutexLock lock(mutex_);
  return refused_;
}

}  // namespace rapt
