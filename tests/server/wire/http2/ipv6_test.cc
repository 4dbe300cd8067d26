// IPv6 addresses of several networks, in a network namespace that has them.
#include <arpa/inet.h>
#include <fcntl.h>
#include <gtest/gtest.h>
#include <linux/ipv6.h>
#include <net/if.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/descriptor.h"
#include "tests/support/raw_http2.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

constexpr char kFirst[] = "2001:db8:0:1::1";
constexpr char kSameNetwork[] = "2001:db8:0:1:ffff:ffff:ffff:ffff";
constexpr char kOtherNetwork[] = "2001:db8:0:2::1";

void Write(const std::string& path, const std::string& text) {
  const Descriptor file(open(path.c_str(), O_WRONLY | O_CLOEXEC));
  EXPECT_EQ(write(file.get(), text.data(), text.size()), static_cast<ssize_t>(text.size())) << path;
}

// Moves the process to a network of its own. Returns false if it may not.
bool EnterNamespace() {
  const uid_t user = getuid();
  const gid_t group = getgid();
  if (unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0) return false;
  Write("/proc/self/uid_map", absl::StrCat(user, " ", user, " 1"));
  Write("/proc/self/setgroups", "deny");
  Write("/proc/self/gid_map", absl::StrCat(group, " ", group, " 1"));
  return true;
}

// Returns false if there is no IPv6.
bool AddAddresses() {
  const Descriptor socket(::socket(AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0));
  ifreq loopback = {};
  std::strcpy(loopback.ifr_name, "lo");
  loopback.ifr_flags = IFF_UP | IFF_RUNNING;
  if (ioctl(socket.get(), SIOCSIFFLAGS, &loopback) != 0) return false;
  for (const char* const address : {kFirst, kSameNetwork, kOtherNetwork}) {
    in6_ifreq request = {};
    inet_pton(AF_INET6, address, &request.ifr6_addr);
    request.ifr6_prefixlen = 128;
    request.ifr6_ifindex = static_cast<int>(if_nametoindex("lo"));
    if (ioctl(socket.get(), SIOCSIFADDR, &request) != 0) return false;
  }
  return true;
}

TEST(Ipv6Test, TheAddressesOfA64ShareItsConnections) {
  if (!EnterNamespace()) GTEST_SKIP() << "no network namespace: " << std::strerror(errno);
  if (!AddAddresses()) GTEST_SKIP() << "no IPv6: " << std::strerror(errno);
  const ServerProcess server(
      {"--grpc_address=[::]:0", "--insecure", "--max_connections_per_address=2"});
  const std::string& bound = server.grpc_address();
  const std::string address = absl::StrCat("[::1]", bound.substr(bound.rfind(':')));
  const auto plain = Security::kPlainText;
  RawHttp2 first(address, plain, kFirst), second(address, plain, kSameNetwork);
  RawHttp2 beyond(address, plain, kFirst), beyond_too(address, plain, kSameNetwork);
  RawHttp2 other(address, plain, kOtherNetwork);
  EXPECT_TRUE(first.Read());
  EXPECT_TRUE(second.Read());
  EXPECT_FALSE(beyond.Read());
  EXPECT_FALSE(beyond_too.Read());
  EXPECT_TRUE(other.Read());
}

}  // namespace
}  // namespace rapt::test
