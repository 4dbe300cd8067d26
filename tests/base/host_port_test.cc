#include "base/host_port.h"

#include <gtest/gtest.h>

#include <optional>
#include <string>

namespace rapt {
namespace {

void ExpectParts(const char* text, const std::string& host, std::optional<int> port,
                 const std::string& node) {
  const std::optional<HostPort> parts = ParseHostPort(text);
  ASSERT_TRUE(parts) << text;
  EXPECT_EQ(parts->host, host) << text;
  EXPECT_EQ(parts->port, port) << text;
  EXPECT_EQ(parts->node(), node) << text;
}

TEST(HostPortTest, AHostMayHaveAPort) {
  ExpectParts("localhost", "localhost", std::nullopt, "localhost");
  ExpectParts("localhost:8000", "localhost", 8000, "localhost");
  ExpectParts("localhost:", "localhost", std::nullopt, "localhost");
  ExpectParts("127.0.0.1:65535", "127.0.0.1", 65535, "127.0.0.1");
  ExpectParts("127.0.0.1:0", "127.0.0.1", 0, "127.0.0.1");
  ExpectParts("[::1]:80", "[::1]", 80, "::1");
  ExpectParts("[fe80::1%25eth0]", "[fe80::1%25eth0]", std::nullopt, "fe80::1%25eth0");
  ExpectParts("", "", std::nullopt, "");
  ExpectParts(":80", "", 80, "");
}

TEST(HostPortTest, RejectsWhatIsNoHost) {
  for (const char* text :
       {"127.0.0.1:99999999", "127.0.0.1:65536", "127.0.0.1:abc", "127.0.0.1:-1", "127.0.0.1: 1",
        "a:80:80", "::1", "[::1", "[::1]x", "[::1]80", "[x]", "[]", "user@localhost", "a b", "a/b",
        "a\"", "a\x01", "http://a:80", "unix:/a"}) {
    EXPECT_FALSE(ParseHostPort(text)) << text;
  }
}

}  // namespace
}  // namespace rapt
