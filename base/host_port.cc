#include "base/host_port.h"

#include <arpa/inet.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"

namespace rapt {
namespace {

constexpr int kMaxPort = 65535;

// "[::1]", also with a zone: "[fe80::1%25eth0]"
bool IsIpv6(absl::string_view host) {
  if (!absl::ConsumePrefix(&host, "[") || !absl::ConsumeSuffix(&host, "]")) return false;
  in6_addr address;
  return inet_pton(AF_INET6, std::string(host.substr(0, host.find('%'))).c_str(), &address) == 1;
}

bool IsName(absl::string_view host) {
  return std::all_of(host.begin(), host.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || absl::StrContains("-._~%!$&'()*+,;=", static_cast<char>(c));
  });
}

}  // namespace

std::string HostPort::node() const {
  return std::string(absl::StripSuffix(absl::StripPrefix(host, "["), "]"));
}

std::optional<HostPort> ParseHostPort(absl::string_view text) {
  const size_t end = absl::StartsWith(text, "[") ? text.find(']') : 0;
  const size_t colon = text.find(':', std::min(end, text.size()));
  const absl::string_view host = text.substr(0, colon);
  if (!IsName(host) && !IsIpv6(host)) return std::nullopt;
  const absl::string_view port = text.substr(std::min(text.size(), host.size() + 1));
  if (port.empty()) return HostPort{host, std::nullopt};
  int number = 0;
  if (port.find_first_not_of("0123456789") != absl::string_view::npos ||
      !absl::SimpleAtoi(port, &number) || number > kMaxPort) {
    return std::nullopt;
  }
  return HostPort{host, number};
}

}  // namespace rapt
