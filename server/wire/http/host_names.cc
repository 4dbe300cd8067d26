#include "server/wire/http/host_names.h"

#include <arpa/inet.h>

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"

namespace rapt::http {
namespace {

constexpr absl::string_view kDigits = "0123456789";
constexpr int kMaxPort = 65535;

// "[::1]", also with a zone: "[fe80::1%25eth0]"
bool IsIpv6(absl::string_view host) {
  if (!absl::ConsumePrefix(&host, "[") || !absl::ConsumeSuffix(&host, "]")) return false;
  in6_addr address;
  return inet_pton(AF_INET6, std::string(host.substr(0, host.find('%'))).c_str(), &address) == 1;
}

// A browser takes a host of digits and dots for an address, short forms such as 127.1 too.
bool IsIpv4(absl::string_view host) {
  return !host.empty() && absl::ascii_isdigit(static_cast<unsigned char>(host[0])) &&
         host.find_first_not_of("0123456789.") == absl::string_view::npos;
}

bool IsName(absl::string_view host) {
  return std::all_of(host.begin(), host.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || absl::StrContains("-._~%!$&'()*+,;=", static_cast<char>(c));
  });
}

bool IsPort(absl::string_view port) {
  int number = 0;
  return port.empty() || (port.find_first_not_of(kDigits) == absl::string_view::npos &&
                          absl::SimpleAtoi(port, &number) && number <= kMaxPort);
}

bool Matches(absl::string_view name, absl::string_view host) {
  if (name == "*") return true;
  if (absl::ConsumePrefix(&name, "*")) {
    return host.size() > name.size() && absl::EndsWithIgnoreCase(host, name);
  }
  return absl::EqualsIgnoreCase(host, name);
}

}  // namespace

std::optional<absl::string_view> HostOf(absl::string_view authority) {
  const size_t end = absl::StartsWith(authority, "[") ? authority.find(']') : 0;
  const size_t colon = authority.find(':', std::min(end, authority.size()));
  const absl::string_view host = authority.substr(0, colon);
  if (!IsName(host) && !IsIpv6(host)) return std::nullopt;
  if (colon != absl::string_view::npos && !IsPort(authority.substr(colon + 1))) return std::nullopt;
  return host;
}

bool HostNames::Contains(absl::string_view host) const {
  if (IsIpv4(host) || IsIpv6(host)) return true;
  absl::ConsumeSuffix(&host, ".");  // of a fully qualified name
  return absl::EqualsIgnoreCase(host, "localhost") ||
         std::any_of(names_.begin(), names_.end(),
                     [&](const std::string& name) { return Matches(name, host); });
}

}  // namespace rapt::http
