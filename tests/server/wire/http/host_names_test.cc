#include "server/wire/http/host_names.h"

#include <gtest/gtest.h>

namespace rapt::http {
namespace {

TEST(HostNamesTest, AddressesAndLocalhostAreAlwaysOurs) {
  const HostNames names({});
  for (const char* host : {"localhost", "LocalHost", "localhost.", "127.0.0.1", "127.1", "10.2.3.4",
                           "[::1]", "[2001:db8::1]", "[fe80::1%25eth0]"}) {
    EXPECT_TRUE(names.Contains(host)) << host;
  }
  for (const char* host : {"", ".", "..", "evil.example", "localhost.evil.example",
                           "127.evil.example", "1.2.3.4.evil", "::1"}) {
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
