#include "rapt/placement.h"

#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <map>
#include <numeric>
#include <optional>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/host_port.h"
#include "base/invalid.h"
#include "base/mutex.h"
#include "base/status_macros.h"

namespace rapt::client {
namespace {

constexpr absl::string_view kDns = "dns:///";

struct FreeAddresses {
  void operator()(addrinfo* addresses) const { freeaddrinfo(addresses); }
};

// "10.0.0.7:8001", "[fd00::7]:8001". Empty for an address that has no such text.
std::string TextOf(const addrinfo& address) {
  char host[NI_MAXHOST], port[NI_MAXSERV];
  if (getnameinfo(address.ai_addr, address.ai_addrlen, host, sizeof host, port, sizeof port,
                  NI_NUMERICHOST | NI_NUMERICSERV) != 0) {
    return "";
  }
  return absl::StrCat(address.ai_family == AF_INET6 ? absl::StrCat("[", host, "]") : host, ":",
                      port);
}

// REQUIRES: the address begins with kDns.
absl::StatusOr<std::vector<std::string>> Resolve(const std::string& address) {
  const std::optional<HostPort> name = ParseHostPort(absl::StripPrefix(address, kDns));
  if (!name || !name->has_both()) {
    return Invalid("address is ", address, "; it must be dns:///NAME:PORT");
  }
  addrinfo hints = {};
  hints.ai_family = AF_UNSPEC;
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  const int error = getaddrinfo(name->node().c_str(), name->service().c_str(), &hints, &found);
  if (error != 0) {
    return absl::UnavailableError(
        absl::StrCat("can't resolve ", address, ": ", gai_strerror(error)));
  }
  const std::unique_ptr<addrinfo, FreeAddresses> addresses(found);
  std::vector<std::string> servers;
  for (const addrinfo* next = found; next != nullptr; next = next->ai_next) {
    if (std::string text = TextOf(*next); !text.empty()) servers.push_back(std::move(text));
  }
  if (!servers.empty()) return servers;
  return absl::UnavailableError(absl::StrCat(address, " has no addresses"));
}

}  // namespace

uint64_t PlacementWeight(absl::string_view server, absl::string_view name) {
  uint64_t hash = 0xcbf29ce484222325;
  const auto add = [&hash](char byte) {
    hash = (hash ^ static_cast<unsigned char>(byte)) * 0x100000001b3;
  };
  for (char byte : server) add(byte);
  add('\0');
  for (char byte : name) add(byte);
  hash = (hash ^ (hash >> 33)) * 0xff51afd7ed558ccd;
  hash = (hash ^ (hash >> 33)) * 0xc4ceb9fe1a85ec53;
  return hash ^ (hash >> 33);
}

std::vector<size_t> RankServers(absl::Span<const std::string> servers, absl::string_view name) {
  std::vector<uint64_t> weights;
  for (const std::string& server : servers) weights.push_back(PlacementWeight(server, name));
  std::vector<size_t> ranks(servers.size());
  std::iota(ranks.begin(), ranks.end(), size_t{0});
  std::sort(ranks.begin(), ranks.end(), [&](size_t a, size_t b) {
    return weights[a] != weights[b] ? weights[a] > weights[b] : servers[a] < servers[b];
  });
  return ranks;
}

class Placement::State {
 public:
  State(std::vector<std::string> addresses, Options options)
      : addresses_(std::move(addresses)), options_(std::move(options)) {
    options_.connect_timeout = {};
  }

  absl::Status Refresh() {
    // The servers, and the options of each.
    std::map<std::string, Options> wanted;
    for (const std::string& address : addresses_) {
      RAPT_RETURN_IF_ERROR(AddServers(address, wanted));
    }
    if (wanted.empty()) {
      return Invalid("addresses is empty; there must be at least one");
    }
    std::vector<std::string> servers;
    std::map<std::string, std::shared_ptr<Client>> clients;
    MutexLock lock(mutex_);
    for (const auto& [server, options] : wanted) {
      std::shared_ptr<Client> client;
      if (const auto known = clients_.find(server); known != clients_.end()) {
        client = known->second;
      } else {
        RAPT_ASSIGN_OR_RETURN(client, Client::Connect(server, options));
      }
      servers.push_back(server);
      clients.emplace(server, std::move(client));
    }
    servers_ = std::move(servers);
    clients_.swap(clients);
    return absl::OkStatus();
  }

  std::shared_ptr<Client> Of(absl::string_view name, size_t rank) const {
    MutexLock lock(mutex_);
    return clients_.at(servers_[RankServers(servers_, name)[rank % servers_.size()]]);
  }

  std::vector<std::string> servers() const {
    MutexLock lock(mutex_);
    return servers_;
  }

 private:
  absl::Status AddServers(const std::string& address,
                          std::map<std::string, Options>& wanted) const {
    if (!absl::StartsWith(address, kDns)) {
      if (wanted.emplace(address, options_).second) return absl::OkStatus();
      return Invalid("address ", address, " is given twice");
    }
    RAPT_ASSIGN_OR_RETURN(const std::vector<std::string> servers, Resolve(address));
    Options options = options_;
    // Certificates are for the name.
    if (options.tls && options.tls->server_name.empty()) {
      options.tls->server_name = ParseHostPort(absl::StripPrefix(address, kDns))->node();
    }
    for (const std::string& server : servers) wanted.emplace(server, options);
    return absl::OkStatus();
  }

  const std::vector<std::string> addresses_;
  Options options_;
  mutable Mutex mutex_;
  std::vector<std::string> servers_ ABSL_GUARDED_BY(mutex_);  // sorted
  std::map<std::string, std::shared_ptr<Client>> clients_ ABSL_GUARDED_BY(mutex_);
};

Placement::Placement(std::unique_ptr<State> state) : state_(std::move(state)) {}
Placement::~Placement() = default;

absl::StatusOr<std::unique_ptr<Placement>> Placement::Connect(std::vector<std::string> addresses,
                                                              const Options& options) {
  auto state = std::make_unique<State>(std::move(addresses), options);
  RAPT_RETURN_IF_ERROR(state->Refresh());
  return std::unique_ptr<Placement>(new Placement(std::move(state)));
}

std::shared_ptr<Client> Placement::Of(absl::string_view name, size_t rank) const {
  return state_->Of(name, rank);
}

std::vector<std::string> Placement::servers() const { return state_->servers(); }

absl::Status Placement::Refresh() { return state_->Refresh(); }

}  // namespace rapt::client
