// Chooses a server for a name, always the same one: caches are in the memory of one server, and
// calls of round robin would miss it.
//
//     auto servers = Placement::Connect({"dns:///rapt-headless:8001"});
//     if (!servers.ok()) return servers.status();
//     const std::shared_ptr<Client> server = (*servers)->Of("chat-17");
//     absl::StatusOr<Cache> cache = CreateCache(*server, {.shapes = ..., .name = "chat-17"});
//
// This header depends on Abseil only.
#ifndef RAPT_CLIENT_RAPT_PLACEMENT_H_
#define RAPT_CLIENT_RAPT_PLACEMENT_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "rapt/client.h"

namespace rapt::client {

// The weight of a server for a name, by rendezvous hashing (Thaler and Ravishankar 1998). It is the
// same in every version of rapt: FNV-1a of 64 bits over the server, a zero byte and the name,
// finished by MurmurHash3's fmix64. docs/kv-cache.md has it in Python.
uint64_t PlacementWeight(absl::string_view server, absl::string_view name);

// Returns the indices of the servers by falling weight for `name`; equal ones by their text. The
// first is the name's server, the next takes its place if that one leaves. So a server that joins
// or leaves moves only the names that it gets or had, and the order of `servers` does not matter.
std::vector<size_t> RankServers(absl::Span<const std::string> servers, absl::string_view name);

// A client for each of several servers. Thread-safe.
class Placement {
 public:
  // Addresses as in Client::Connect(), of one server each, or "dns:///NAME:PORT", which stands for
  // all addresses of a name, such as a headless service of Kubernetes. There a server is known by
  // its IP address and port. Does not wait for the servers: the first calls report errors.
  // InvalidArgument if there are no addresses or two are the same, and as Client::Connect();
  // Unavailable if a name has no address.
  static absl::StatusOr<std::unique_ptr<Placement>> Connect(std::vector<std::string> addresses,
                                                            const Options& options = {});

  ~Placement();
  Placement(const Placement&) = delete;
  Placement& operator=(const Placement&) = delete;

  // Returns the client of the server that `name` has, or of the server at that rank, which wraps
  // around. Clients outlive this object while they are held.
  std::shared_ptr<Client> Of(absl::string_view name, size_t rank = 0) const;

  // The servers by which names are placed, such as "10.0.0.7:8001", in the order of their text.
  std::vector<std::string> servers() const;

  // Resolves names again. Servers that are still there keep their clients. After an error nothing
  // has changed. Caches of names that moved are where they were: ExportCache() and ImportCache()
  // take them along.
  absl::Status Refresh();

 private:
  class State;
  explicit Placement(std::unique_ptr<State> state);

  const std::unique_ptr<State> state_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_PLACEMENT_H_
