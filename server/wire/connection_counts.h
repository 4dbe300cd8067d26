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

// Counts the open connections of several threads, in total and by network, and those refused.
// Thread-safe.
class SharedConnectionCounts {
 public:
  // kFull: the total is reached. kAtLimit: only the network's limit is.
  enum class Entrance : uint8_t { kEntered, kFull, kAtLimit };

  // A network may have at most `per_network` connections; 0: a quarter of `total`, at least one.
  SharedConnectionCounts(int64_t total, int64_t per_network);

  // Counts a new connection, or a refusal if it exceeds a limit; then returns false.
  bool Enter(const PeerNetwork& network);
  // As Enter(), but leaves it to the caller to count a refusal.
  Entrance TryEnter(const PeerNetwork& network);
  void Refuse();
  // REQUIRES: a connection of this network has entered and not left.
  void Leave(const PeerNetwork& network);
  // Counts a new connection of `arriving` in place of one of `leaving`. Returns false, and changes
  // nothing, if `arriving` would have more than it may have. REQUIRES: as Leave().
  bool Replace(const PeerNetwork& leaving, const PeerNetwork& arriving);

  int64_t count() const;
  int64_t refused() const;

 private:
  bool IsAtLimit(const PeerNetwork& network) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Add(const PeerNetwork& network) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Remove(const PeerNetwork& network) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const int64_t total_;
  const int64_t per_network_;
  mutable Mutex mutex_;
  int64_t count_ ABSL_GUARDED_BY(mutex_) = 0;
  int64_t refused_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::flat_hash_map<PeerNetwork, int64_t> by_network_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_CONNECTION_COUNTS_H_
