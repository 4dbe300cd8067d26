#include "server/wire/http/host_names.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/strip.h"

namespace rapt::http {
namespace {

// A browser takes a host of digits and dots for an address, short forms such as 127.1 too.
bool IsIpv4(absl::string_view host) {
  return !host.empty() && absl::ascii_isdigit(static_cast<unsigned char>(host[0])) &&
         host.find_first_not_of("0123456789.") == absl::string_view::npos;
}

bool Matches(absl::string_view name, absl::string_view host) {
  if (name == "*") return true;
  if (absl::ConsumePrefix(&name, "*")) {
    return host.size() > name.size() && absl::EndsWithIgnoreCase(host, name);
  }
  return absl::EqualsIgnoreCase(host, name);
}

}  // namespace

bool HostNames::Contains(absl::string_view host) const {
  if (IsIpv4(host) || absl::StartsWith(host, "[")) return true;
  absl::ConsumeSuffix(&host, ".");  // of a fully qualified name
  return absl::EqualsIgnoreCase(host, "localhost") ||
         std::any_of(names_.begin(), names_.end(),
                     [&](const std::string& name) { return Matches(name, host); });
}

}  // namespace rapt::http
