#include "client/http/target.h"

#include <netdb.h>
#include <openssl/err.h>
#include <openssl/ssl.h>

#include <cstring>
#include <optional>

#include "absl/strings/str_cat.h"
#include "base/host_port.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt::client {
namespace {

absl::Status Unusable(absl::string_view what, const std::string& path) {
  ERR_clear_error();
  return Invalid("can't use ", what, " ", path);
}

}  // namespace

absl::StatusOr<HttpTarget> HttpTarget::Make(const std::string& address, const Options& options) {
  HttpTarget target;
  target.address_ = address;
  target.token_ = options.token;
  RAPT_RETURN_IF_ERROR(target.Resolve());
  if (options.tls) RAPT_RETURN_IF_ERROR(target.UseTls(*options.tls));
  if (!options.token.empty() && !options.tls) {
    return Invalid("a token needs TLS over HTTP; it is never sent in plain text");
  }
  return target;
}

absl::Status HttpTarget::Resolve() {
  const std::optional<HostPort> parts = ParseHostPort(address_);
  if (!parts || !parts->has_both()) {
    return Invalid("the address is '", address_, "'; over HTTP it must be HOST:PORT");
  }
  server_name_ = parts->node();
  addrinfo hints = {};
  hints.ai_socktype = SOCK_STREAM;
  addrinfo* found = nullptr;
  if (const int error = getaddrinfo(server_name_.c_str(), parts->service().c_str(), &hints, &found);
      error != 0) {
    return Invalid("can't resolve '", address_, "': ", gai_strerror(error));
  }
  for (const addrinfo* name = found; name != nullptr; name = name->ai_next) {
    std::memcpy(&names_.emplace_back().bytes, name->ai_addr, name->ai_addrlen);
    names_.back().size = name->ai_addrlen;
  }
  freeaddrinfo(found);
  return absl::OkStatus();
}

absl::Status HttpTarget::UseTls(const TlsOptions& options) {
  if (options.cert_file.empty() != options.key_file.empty()) {
    return Invalid("a TLS certificate and its key must be set together; only one is set");
  }
  if (!options.server_name.empty()) server_name_ = options.server_name;
  tls_ = {SSL_CTX_new(TLS_client_method()), SSL_CTX_free};
  SSL_CTX* const context = tls_.get();
  SSL_CTX_set_min_proto_version(context, TLS1_2_VERSION);
  SSL_CTX_set_verify(context, SSL_VERIFY_PEER, nullptr);
  SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE | SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
  const int has_authorities =
      options.ca_file.empty()
          ? SSL_CTX_set_default_verify_paths(context)
          : SSL_CTX_load_verify_locations(context, options.ca_file.c_str(), nullptr);
  if (has_authorities != 1) return Unusable("the certificate authorities", options.ca_file);
  if (options.cert_file.empty()) return absl::OkStatus();
  if (SSL_CTX_use_certificate_chain_file(context, options.cert_file.c_str()) != 1) {
    return Unusable("the certificate", options.cert_file);
  }
  if (SSL_CTX_use_PrivateKey_file(context, options.key_file.c_str(), SSL_FILETYPE_PEM) != 1 ||
      SSL_CTX_check_private_key(context) != 1) {
    return Unusable("the private key", options.key_file);
  }
  return absl::OkStatus();
}

std::string HttpTarget::Head(absl::string_view method, absl::string_view path,
                             const std::vector<std::pair<absl::string_view, std::string>>& headers,
                             size_t body_bytes) const {
  std::string head = absl::StrCat(method, " ", path, " HTTP/1.1\r\nHost: ", address_,
                                  "\r\nContent-Length: ", body_bytes, "\r\n");
  if (!token_.empty()) absl::StrAppend(&head, "Authorization: Bearer ", token_, "\r\n");
  for (const auto& [name, value] : headers) absl::StrAppend(&head, name, ": ", value, "\r\n");
  return head + "\r\n";
}

}  // namespace rapt::client
