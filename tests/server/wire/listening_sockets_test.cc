#include "server/wire/listening_sockets.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/socket.h>

#include <cstdint>
#include <fstream>
#include <utility>
#include <vector>

#include "base/check.h"
#include "base/host_limits.h"

namespace rapt {
namespace {

using ::testing::SizeIs;

sockaddr_in AddressOf(uint32_t host, int port) {
  sockaddr_in name = {};
  name.sin_family = AF_INET;
  name.sin_addr.s_addr = htonl(host);
  name.sin_port = htons(static_cast<uint16_t>(port));
  return name;
}

constexpr uint32_t kFirst = INADDR_LOOPBACK;       // 127.0.0.1
constexpr uint32_t kSecond = INADDR_LOOPBACK + 1;  // 127.0.0.2

// What a host name with two addresses resolves to.
class TwoAddresses {
 public:
  explicit TwoAddresses(int port) : names_{AddressOf(kFirst, port), AddressOf(kSecond, port)} {
    for (int n = 0; n < 2; ++n) {
      list_[n].ai_family = AF_INET;
      list_[n].ai_addr = reinterpret_cast<sockaddr*>(&names_[n]);
      list_[n].ai_addrlen = sizeof(names_[n]);
    }
    list_[0].ai_next = &list_[1];
  }

  const addrinfo* get() const { return list_; }

 private:
  sockaddr_in names_[2];
  addrinfo list_[2] = {};
};

Descriptor Occupy(uint32_t host, int port) {
  Descriptor socket(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  RAPT_CHECK(socket.get() >= 0, "no descriptor is left");
  const sockaddr_in name = AddressOf(host, port);
  // Another process may use the port; then it is occupied as well.
  (void)bind(socket.get(), reinterpret_cast<const sockaddr*>(&name), sizeof(name));
  return socket;
}

TEST(ListenOnAllTest, BindsAllAddressesToOnePort) {
  const ListeningSockets sockets = ListenOnAll(TwoAddresses(0).get());
  EXPECT_THAT(sockets.descriptors, SizeIs(2));
  EXPECT_GT(sockets.port, 0);
}

TEST(ListenOnAllTest, BindsNoneIfOneIsInUse) {
  const int port = ListenOnAll(TwoAddresses(0).get()).port;  // free now
  const Descriptor other = Occupy(kSecond, port);
  EXPECT_THAT(ListenOnAll(TwoAddresses(port).get()).descriptors, SizeIs(0));
}

// Every eighth port is in use on the second address. Without a second attempt one of 100 calls
// fails almost surely; that 16 attempts of one call fail is as unlikely.
TEST(ListenOnAllTest, ChoosesAPortThatIsFreeOnAllAddresses) {
  int first = 0, last = 0;
  std::ifstream("/proc/sys/net/ipv4/ip_local_port_range") >> first >> last;
  ASSERT_GT(last, first);
  RaiseDescriptorLimit();
  std::vector<Descriptor> occupied;
  // Pairs, because the kernel prefers the ports of one parity.
  for (int port = first; port < last; port += 16) {
    occupied.push_back(Occupy(kSecond, port));
    occupied.push_back(Occupy(kSecond, port + 1));
  }
  for (int n = 0; n < 100; ++n) {
    ASSERT_THAT(ListenOnAll(TwoAddresses(0).get()).descriptors, SizeIs(2)) << n;
  }
}

TEST(ListenOnTest, ListensOnAllAddressesOfAHost) {
  EXPECT_TRUE(ListenOn("localhost:0").ok());
  EXPECT_TRUE(ListenOn("0.0.0.0:0").ok());
}

TEST(ListenOnTest, AnAddressThatIsNotLocalIsUnavailable) {
  EXPECT_EQ(ListenOn("192.0.2.1:0").status(),
            absl::UnavailableError("can't listen on 192.0.2.1:0; the port may be in use, or the "
                                   "address may not be local"));
}

}  // namespace
}  // namespace rapt
