// Identifying callers. tests/server/security_test.cc tests token files through the server.
#include "server/calls/access.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "tests/support/fake_clock.h"

namespace rapt {
namespace {

// SHA-256 of "secret".
constexpr char kHash[] = "2bb80d537b1da3e38bd30361aa855686bde0eacd7162fef6a25fe97bf527a25b";

class AccessTest : public ::testing::Test {
 protected:
  std::unique_ptr<Access> Open(bool with_tokens) {
    const std::filesystem::path file =
        std::filesystem::path(::testing::TempDir()) / "access_test_tokens";
    std::ofstream(file) << "alice " << kHash << "\n";
    auto access = Access::Open(with_tokens ? file.string() : "", clock_);
    EXPECT_TRUE(access.ok()) << access.status();
    return *std::move(access);
  }

  test::FakeClock clock_;
};

TEST_F(AccessTest, WithoutTokensTheIdentityIsTheCertificateOrTheAddress) {
  const std::unique_ptr<Access> access = Open(/*with_tokens=*/false);
  EXPECT_EQ(access->Identify({.peer = "ipv4:127.0.0.1:4711"}).value(), "ipv4:127.0.0.1");
  EXPECT_EQ(access->Identify({.peer = "ipv6:%5B::1%5D:4711"}).value(), "ipv6:::/64");
  EXPECT_EQ(access->Identify({.peer = "ipv4"}).value(), "ipv4");
  EXPECT_EQ(access->Identify({.peer = "unix:/run/some.sock"}).value(), "unix");
  EXPECT_EQ(access->Identify({.certificate = "bob", .peer = "ipv4:127.0.0.1:4711"}).value(),
            "certificate:bob");
  EXPECT_EQ(access->Identify({.certificate = "", .peer = "ipv4:127.0.0.1:4711"}).value(),
            "certificate:")
      << "verified, although it has no name";
  EXPECT_EQ(access->Identify({.authorization = {"Bearer secret"}, .peer = "unix:"}).value(), "unix")
      << "tokens are not required";
}

TEST_F(AccessTest, AddressesOfOneIpv6NetworkAreOneCaller) {
  const std::unique_ptr<Access> access = Open(/*with_tokens=*/false);
  for (const char* peer : {"ipv6:%5B2001:db8::1%5D:4711", "ipv6:%5B2001:db8::1234:5:6:7%5D:4712",
                           "ipv6:[2001:db8::1]:4711", "ipv6:%5B2001:db8::1%25eth0%5D:4711"}) {
    EXPECT_EQ(access->Identify({.peer = peer}).value(), "ipv6:2001:db8::/64") << peer;
  }
  EXPECT_EQ(access->Identify({.peer = "ipv6:[2001:db8:0:1::1]:4711"}).value(),
            "ipv6:2001:db8:0:1::/64");
  EXPECT_EQ(access->Identify({.peer = "ipv6:[address]:4711"}).value(), "ipv6:[address]");
}

TEST_F(AccessTest, WithTokensTheIdentityIsTheHolder) {
  const std::unique_ptr<Access> access = Open(/*with_tokens=*/true);
  for (const char* value : {"Bearer secret", "bearer secret"}) {
    EXPECT_EQ(access->Identify({.authorization = {value}, .certificate = "bob"}).value(),
              "token:alice");
  }
  const HeaderValues refused[] = {{},
                                  {"secret"},
                                  {"Basic secret"},
                                  {"Bearer Secret"},
                                  {"Bearer "},
                                  {"Bearer secret", "Bearer secret"}};
  for (const HeaderValues& authorization : refused) {
    const absl::Status status =
        access->Identify({.authorization = authorization, .certificate = "bob"}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kUnauthenticated);
    EXPECT_EQ(status.message().find("secret"), std::string::npos)
        << "the message must not contain the token";
  }
}

}  // namespace
}  // namespace rapt
