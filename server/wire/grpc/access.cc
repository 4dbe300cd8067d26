#include "server/wire/grpc/access.h"

#include <optional>
#include <vector>

#include "absl/memory/memory.h"
#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"

namespace rapt {
namespace {

constexpr char kHeader[] = "authorization";
constexpr char kScheme[] = "Bearer ";

// The token that came with the call; nothing where there is none, or more than one.
std::optional<absl::string_view> TokenOf(const grpc::ServerContextBase& context) {
  const auto [first, last] = context.client_metadata().equal_range(kHeader);
  if (first == last || std::next(first) != last) return std::nullopt;
  absl::string_view value(first->second.data(), first->second.size());
  if (!absl::StartsWithIgnoreCase(value, kScheme)) return std::nullopt;
  value.remove_prefix(sizeof(kScheme) - 1);
  return value;
}

std::string PeerOf(const grpc::ServerContextBase& context) {
  const auto names = context.auth_context()->GetPeerIdentity();
  if (!names.empty()) {
    return absl::StrCat("certificate:", absl::string_view(names[0].data(), names[0].size()));
  }
  std::string peer = context.peer();
  if (absl::StartsWith(peer, "unix")) return "unix";
  const size_t colon = peer.rfind(':');
  if (colon > peer.find(':')) peer.resize(colon);
  return peer;
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

absl::StatusOr<std::string> Access::Identify(const grpc::ServerContextBase& context) const {
  if (tokens_ == nullptr) return PeerOf(context);
  const std::optional<absl::string_view> token = TokenOf(context);
  if (!token) {
    return absl::UnauthenticatedError(
        "this server asks for a token, in the metadata as authorization: Bearer TOKEN");
  }
  const std::optional<std::string> holder = tokens_->Get()->HolderOf(*token);
  if (!holder) return absl::UnauthenticatedError("the token is not one of this server's");
  return absl::StrCat("token:", *holder);
}

}  // namespace rapt
