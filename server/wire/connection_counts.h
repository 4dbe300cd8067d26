#ifndef RAPT_SERVER_WIRE_CONNECTION_COUNTS_H_
#define RAPT_SERVER_WIRE_CONNECTION_COUNTS_H_

#include <sys/socket.h>

#include <array>
#include <cstdint>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "base/mutex.h"

namespace rapt {

// The network that a connection comes from: an IPv4 address, or the /64 of an IPv6 address, because
// one host can use every address of its /64.
using PeerNetwork = std::array<uint8_t, 16>;

// Returns the network of a peer. All peers without an IP address count as one network. An IPv4
// address mapped to IPv6 counts as the IPv4 address.
PeerNetwork NetworkOf(const sockaddr_storage& peer);

// Returns "ipv4:127.0.0.1:4711", "ipv6:[::1]:4711" or "unix:". IPv4 over an IPv6 socket is IPv4.
std::string PeerNameOf(const sockaddr_storage& peer);

// Counts open connections, in total and by network. Not thread-safe.
class ConnectionCounts {
 public:
  // A network may have at most `per_network` connections; 0: a quarter of `total`, at least one.
  ConnectionCounts(int64_t total, int64_t per_network);

  // Counts a new connection. Returns false, without counting it, if it exceeds a limit.
  bool Enter(const PeerNetwork& network);
  // REQUIRES: a connection of this network has entered and not left.
  void Leave(const PeerNetwork& network);
  // Counts a new connection of `arriving` in place of one of `leaving`. Returns false, and changes
  // nothing, if `arriving` would have more than it may have. REQUIRES: as Leave().
  bool Replace(const PeerNetwork& leaving, const PeerNetwork& arriving);

  int64_t count() const { return count_; }
  bool IsFull() const { return count_ >= total_; }
  // Returns whether the network has as many as it may have.
  bool IsAtLimit(const PeerNetwork& network) const;
  // Returns whether Enter() would return false.
  bool IsFullFor(const PeerNetwork& network) const;

 private:
  const int64_t total_;
  const int64_t per_network_;
  int64_t count_ = 0;
  absl::flat_hash_map<PeerNetwork, int64_t> by_network_;
};

// Counts the connections of several threads, and those refused. Thread-safe.
class SharedConnectionCounts {
 public:
  // kFull: the total is reached. kAtLimit: only the network's limit is.
  enum class Entrance : uint8_t { kEntered, kFull, kAtLimit };

  // As for ConnectionCounts.
  SharedConnectionCounts(int64_t total, int64_t per_network) : counts_(total, per_network) {}

  bool Enter(const PeerNetwork& network);
  // As Enter(), but leaves it to the caller to count a refusal.
  Entrance TryEnter(const PeerNetwork& network);
  void Refuse();
  void Leave(const PeerNetwork& network);
  bool Replace(const PeerNetwork& leaving, const PeerNetwork& arriving);

  int64_t count() const;
  int64_t refused() const;

 private:
  mutable Mutex mutex_;
  ConnectionCounts counts_ ABSL_GUARDED_BY(mutex_);
  int64_t refused_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_CONNECTION_COUNTS_H_
