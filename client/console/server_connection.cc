#include "client/console/server_connection.h"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iterator>
#include <limits>
#include <optional>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"

namespace rapt {
namespace {

constexpr const char* kDefaultAddress = "127.0.0.1:8001";
constexpr double kMaxTimeoutS = 86400;
constexpr std::chrono::seconds kTimeToAnswerOtherwise{2};

std::string Environment(const char* name, const char* fallback) {
  const char* value = std::getenv(name);
  return value == nullptr || *value == '\0' ? fallback : value;
}

std::optional<client::TlsOptions> TlsOf(const ServerFlags& flags) {
  const client::TlsOptions tls{.ca_file = flags.tls_ca,
                               .cert_file = flags.tls_cert,
                               .key_file = flags.tls_key,
                               .server_name = flags.tls_name};
  const bool uses_tls = flags.tls || !(tls.ca_file + tls.cert_file + tls.key_file).empty() ||
                        !tls.server_name.empty();
  // RAPT_TLS_CA is meant for servers with TLS. A Unix domain socket has none.
  if (!uses_tls || absl::StartsWith(flags.address, "unix:")) return std::nullopt;
  return tls;
}

// Returns the file's text without surrounding white space. InvalidArgument if that is empty.
absl::StatusOr<std::string> ReadToken(const std::string& path) {
  if (path.empty()) return path;
  std::ifstream file(path);
  std::string token(std::istreambuf_iterator<char>(file), {});
  absl::StripAsciiWhitespace(&token);
  if (!token.empty()) return token;
  return absl::InvalidArgumentError(
      absl::StrFormat("--token-file %s can't be read or is empty; it must hold a token", path));
}

// Whether a server answers at the address if TLS is used where it was not, or the reverse. Sends no
// token.
bool AnswersOtherwise(const std::string& address, client::Options options) {
  if (absl::StartsWith(address, "unix:")) return false;
  if (options.tls) {
    options.tls = std::nullopt;
  } else {
    options.tls.emplace();
  }
  options.token.clear();
  options.connect_timeout = {};
  options.retries.max_attempts = 1;
  const absl::StatusOr<std::unique_ptr<client::Client>> server =
      client::Client::Connect(address, options);
  if (!server.ok()) return false;
  const absl::Status status =
      (*server)->CheckHealth("", {.timeout = kTimeToAnswerOtherwise}).status();
  if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status)) return true;
  // Its certificate is seldom one of the system's authorities.
  return options.tls && absl::StrContains(absl::AsciiStrToLower(status.message()), "certificate");
}

absl::Status Unreachable(const std::string& address, const client::Options& options) {
  if (AnswersOtherwise(address, options)) {
    return absl::UnavailableError(absl::StrCat(
        "the server at ", address,
        options.tls
            ? " speaks plain text; leave out --tls and its files, also RAPT_TLS_CA"
            : " speaks TLS; name the authority of its certificate by --tls-ca, or set --tls"));
  }
  return absl::UnavailableError(absl::StrFormat(
      "can't reach a server at %s%s; start rapt-server there and wait until it is ready, or set "
      "--address",
      address, options.tls ? " over TLS with certificates that both sides trust" : ""));
}

}  // namespace

ServerFlags::ServerFlags()
    : address(Environment("RAPT_ADDRESS", kDefaultAddress)),
      tls_ca(Environment("RAPT_TLS_CA", "")) {}

std::vector<Flag> ServerFlags::Table() {
  return {{"address", "HOST:PORT",
           "server address, unix:PATH, or dns:///NAME:PORT for all addresses of a name (default: "
           "RAPT_ADDRESS, else 127.0.0.1:8001)",
           &address},
          {"timeout", "SECONDS", "timeout of each call (default: 60)", &timeout_s},
          {"tls", "", "use TLS; implied by the other --tls flags", &tls},
          {"tls-ca", "FILE",
           "trusted certificate authorities (default: RAPT_TLS_CA, else the system's)", &tls_ca},
          {"tls-cert", "FILE", "client certificate, if the server requires one", &tls_cert},
          {"tls-key", "FILE", "private key of --tls-cert", &tls_key},
          {"tls-name", "HOST", "name in the server's certificate (default: the host of --address)",
           &tls_name},
          {"token-file", "FILE", "file with the token, if the server requires one", &token_file}};
}

absl::StatusOr<client::Options> OptionsOf(const ServerFlags& flags) {
  if (!(flags.timeout_s > 0 && flags.timeout_s <= kMaxTimeoutS)) {
    return absl::InvalidArgumentError(
        absl::StrFormat("--timeout is %g; it takes seconds, more than 0 and at most %g",
                        flags.timeout_s, kMaxTimeoutS));
  }
  RAPT_ASSIGN_OR_RETURN(std::string token, ReadToken(flags.token_file));
  return client::Options{.tls = TlsOf(flags),
                         .token = std::move(token),
                         .default_timeout = std::chrono::duration_cast<std::chrono::nanoseconds>(
                             std::chrono::duration<double>(flags.timeout_s)),
                         .max_message_bytes = std::numeric_limits<int32_t>::max(),
                         .connections = 1};
}

absl::StatusOr<std::unique_ptr<client::Client>> Connect(const ServerFlags& flags) {
  RAPT_ASSIGN_OR_RETURN(const client::Options options, OptionsOf(flags));
  absl::StatusOr<std::unique_ptr<client::Client>> server =
      client::Client::Connect(flags.address, options);
  if (absl::IsUnavailable(server.status())) return Unreachable(flags.address, options);
  return server;
}

absl::StatusOr<client::HealthStatus> CheckHealth(const ServerFlags& flags,
                                                 const std::string& service) {
  RAPT_ASSIGN_OR_RETURN(client::Options options, OptionsOf(flags));
  const auto timeout = std::min(options.connect_timeout, options.default_timeout);
  options.connect_timeout = {};  // it would wait until the server is ready
  RAPT_ASSIGN_OR_RETURN(const std::unique_ptr<client::Client> server,
                        client::Client::Connect(flags.address, options));
  absl::StatusOr<client::HealthStatus> health = server->CheckHealth(service, {.timeout = timeout});
  if (absl::IsUnavailable(health.status()) || absl::IsDeadlineExceeded(health.status())) {
    return Unreachable(flags.address, options);
  }
  return health;
}

}  // namespace rapt
