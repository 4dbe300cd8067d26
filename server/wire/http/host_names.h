// The names under which clients reach an HTTP server.
#ifndef RAPT_SERVER_WIRE_HTTP_HOST_NAMES_H_
#define RAPT_SERVER_WIRE_HTTP_HOST_NAMES_H_

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"

namespace rapt::http {

// Whether a host is a server's own. A web page whose author lets its name resolve to the server
// (DNS rebinding) is of the server's origin to a browser, but its requests name the page's host.
class HostNames {
 public:
  // "*.example.org" stands for all names below example.org, "*" for all names.
  explicit HostNames(std::vector<std::string> names) : names_(std::move(names)) {}

  // True for the names, localhost and every IP address, which no name server can redirect.
  // REQUIRES: ParseHostPort() returned the host.
  bool Contains(absl::string_view host) const;

 private:
  const std::vector<std::string> names_;
};

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_HOST_NAMES_H_
