#include "server/wire/http/host_names.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace rapt::http {
namespace {

TEST(HostNamesTest, AHostMayHaveAPort) {
  EXPECT_EQ(HostOf("localhost"), "localhost");
  EXPECT_EQ(HostOf("localhost:8000"), "localhost");
  EXPECT_EQ(HostOf("localhost:"), "localhost");
  EXPECT_EQ(HostOf("127.0.0.1:65535"), "127.0.0.1");
  EXPECT_EQ(HostOf("[::1]:80"), "[::1]");
  EXPECT_EQ(HostOf("[fe80::1%25eth0]"), "[fe80::1%25eth0]");
  EXPECT_EQ(HostOf(""), "");
}

TEST(HostNamesTest, RejectsWhatIsNoHost) {
  for (const char* authority :
       {"127.0.0.1:99999999", "127.0.0.1:65536", "127.0.0.1:abc", "127.0.0.1:-1", "a:80:80", "::1",
        "[::1", "[::1]x", "[::1]80", "[x]", "[]", "user@localhost", "a b", "a/b", "a\"", "a\x01"}) {
    EXPECT_EQ(HostOf(authority), std::nullopt) << authority;
  }
}

TEST(HostNamesTest, AddressesAndLocalhostAreAlwaysOurs) {
  const HostNames names({});
  for (const char* host : {"localhost", "LocalHost", "localhost.", "127.0.0.1", "127.1", "10.2.3.4",
                           "[::1]", "[2001:db8::1]", "[fe80::1%25eth0]"}) {
    EXPECT_TRUE(names.Contains(host)) << host;
  }
  for (const char* host : {"", ".", "..", "evil.example", "localhost.evil.example",
                           "127.evil.example", "1.2.3.4.evil", "[::1", "::1"}) {
    EXPECT_FALSE(names.Contains(host)) << host;
  }
}

TEST(HostNamesTest, NamesAreListedWholeOrBelowADomain) {
  const HostNames names({"rapt", "*.example.org"});
  for (const char* host : {"rapt", "RAPT", "rapt.", "a.example.org", "a.b.EXAMPLE.org."}) {
    EXPECT_TRUE(names.Contains(host)) << host;
  }
  for (const char* host : {"rapt.evil.example", "example.org", ".example.org", "evilexample.org",
                           "raptx", "a.example.org.evil"}) {
    EXPECT_FALSE(names.Contains(host)) << host;
  }
  EXPECT_TRUE(HostNames({"*"}).Contains("anything.example"));
}

}  // namespace
}  // namespace rapt::http
