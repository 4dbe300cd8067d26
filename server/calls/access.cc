#include "server/calls/access.h"

#include <arpa/inet.h>
#include <netinet/in.h>

#include <algorithm>
#include <optional>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"

namespace rapt {
namespace {

constexpr char kScheme[] = "Bearer ";

// Returns nullopt if there is no token, or more than one.
std::optional<absl::string_view> TokenOf(const HeaderValues& authorization) {
  if (authorization.size() != 1) return std::nullopt;
  absl::string_view value = authorization.front();
  if (!absl::StartsWithIgnoreCase(value, kScheme)) return std::nullopt;
  value.remove_prefix(sizeof(kScheme) - 1);
  return value;
}

// Returns the /64 of "ipv6:%5B::1%5D" or "ipv6:[::1]", because one host can use every address of
// its /64. Returns other peers unchanged.
std::string NetworkOf(absl::string_view peer) {
  absl::string_view address = peer;
  if (!absl::ConsumePrefix(&address, "ipv6:")) return std::string(peer);
  if (!absl::ConsumePrefix(&address, "%5B")) absl::ConsumePrefix(&address, "[");
  address = address.substr(0, address.find_first_of("%]"));  // without a zone
  in6_addr network;
  if (inet_pton(AF_INET6, std::string(address).c_str(), &network) != 1) return std::string(peer);
  std::fill(network.s6_addr + 8, network.s6_addr + 16, 0);
  char text[INET6_ADDRSTRLEN];
  return absl::StrCat("ipv6:", inet_ntop(AF_INET6, &network, text, sizeof(text)), "/64");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Access>> Access::Open(const std::string& token_file,
                                                     const Clock& clock) {
  if (token_file.empty()) return absl::WrapUnique(new Access(nullptr));
  auto tokens = Reloaded<Tokens>::Load(
      {{"--token_file", token_file}},
      [](const std::vector<std::string>& contents) { return Tokens::Parse(contents[0]); }, clock);
  if (!tokens.ok()) return tokens.status();
  return absl::WrapUnique(new Access(*std::move(tokens)));
}

std::string Access::PeerOf(const CallHeaders& headers) {
  if (headers.certificate) return absl::StrCat("certificate:", *headers.certificate);
  const absl::string_view peer = headers.peer;
  if (absl::StartsWith(peer, "unix")) return "unix";
  const size_t colon = peer.rfind(':');
  return NetworkOf(colon > peer.find(':') ? peer.substr(0, colon) : peer);
}

absl::StatusOr<std::string> Access::Identify(const CallHeaders& headers) const {
  if (tokens_ == nullptr) return PeerOf(headers);
  const std::optional<absl::string_view> token = TokenOf(headers.authorization);
  if (!token) {
    return absl::UnauthenticatedError(
        "this server requires a token, in the metadata as authorization: Bearer TOKEN");
  }
  const std::optional<std::string> holder = tokens_->Get()->HolderOf(*token);
  if (!holder) return absl::UnauthenticatedError("the token is not known to this server");
  return absl::StrCat("token:", *holder);
}

void Access::Reload() const {
  if (tokens_ != nullptr) tokens_->Reload();
}

}  // namespace rapt
