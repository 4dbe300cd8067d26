// Parses "localhost:8001", "127.0.0.1", "[::1]:80".
#ifndef RAPT_BASE_HOST_PORT_H_
#define RAPT_BASE_HOST_PORT_H_

#include <optional>
#include <string>

#include "absl/strings/string_view.h"

namespace rapt {

struct HostPort {
  absl::string_view host;   // a name, an IPv4 address, or an IPv6 address in brackets
  std::optional<int> port;  // from 0 to 65535

  bool has_both() const { return !host.empty() && port; }
  // As getaddrinfo() takes them.
  std::string node() const;
  std::string service() const { return std::to_string(port.value_or(0)); }
};

// Returns nullopt if the text is malformed. The host may be empty, and the port, with its colon or
// without. REQUIRES: the text outlives the result.
std::optional<HostPort> ParseHostPort(absl::string_view text);

}  // namespace rapt

#endif  // RAPT_BASE_HOST_PORT_H_
