// A server of HTTP/1.1 as a client knows it.
#ifndef RAPT_CLIENT_HTTP_TARGET_H_
#define RAPT_CLIENT_HTTP_TARGET_H_

#include <sys/socket.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "rapt/client.h"

using SSL_CTX = struct ssl_ctx_st;

namespace rapt::client {

// What the connections to one server share. Thread-safe.
class HttpTarget {
 public:
  // Resolves the address, "HOST:PORT", and reads the files of `options`. InvalidArgument if one of
  // them is unusable, or if a token would be sent in plain text.
  static absl::StatusOr<HttpTarget> Make(const std::string& address, const Options& options);

  // Returns the head of a request, with the empty line. `headers`: name and value.
  std::string Head(absl::string_view method, absl::string_view path,
                   const std::vector<std::pair<absl::string_view, std::string>>& headers = {},
                   size_t body_bytes = 0) const;

  // A socket address.
  struct Name {
    sockaddr_storage bytes = {};
    socklen_t size = 0;
  };

  const std::string& address() const { return address_; }
  // Of the host, at least one, in the order in which they should be tried.
  const std::vector<Name>& names() const { return names_; }
  SSL_CTX* tls() const { return tls_.get(); }  // null: plain text
  // In the server's certificate: a name or an IP address.
  const std::string& server_name() const { return server_name_; }

 private:
  HttpTarget() = default;
  absl::Status Resolve();
  absl::Status UseTls(const TlsOptions& options);

  std::string address_, server_name_, token_;
  std::vector<Name> names_;
  std::shared_ptr<SSL_CTX> tls_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_HTTP_TARGET_H_
