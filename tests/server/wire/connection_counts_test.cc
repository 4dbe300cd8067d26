#include "server/wire/connection_counts.h"

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>

#include <string>

namespace rapt {
namespace {

PeerNetwork Network(const std::string& address) {
  sockaddr_storage peer = {};
  auto& ipv4 = reinterpret_cast<sockaddr_in&>(peer);
  auto& ipv6 = reinterpret_cast<sockaddr_in6&>(peer);
  if (inet_pton(AF_INET, address.c_str(), &ipv4.sin_addr) == 1) {
    peer.ss_family = AF_INET;
  } else if (inet_pton(AF_INET6, address.c_str(), &ipv6.sin6_addr) == 1) {
    peer.ss_family = AF_INET6;
  }
  return NetworkOf(peer);
}

TEST(PeerNetworkTest, IsAnIpv4AddressOrAnIpv6Prefix) {
  EXPECT_NE(Network("10.0.0.1"), Network("10.0.0.2"));
  EXPECT_EQ(Network("::ffff:10.0.0.1"), Network("10.0.0.1"));
  EXPECT_EQ(Network("2001:db8:1:2::1"), Network("2001:db8:1:2:ffff:ffff:ffff:ffff"));
  EXPECT_NE(Network("2001:db8:1:2::1"), Network("2001:db8:1:3::1"));
  EXPECT_NE(Network("::1"), Network("0.0.0.1"));
  EXPECT_NE(Network("10.0.0.1"), Network("not an address"));
}

TEST(ConnectionCountsTest, BoundsTheTotalAndEachNetwork) {
  SharedConnectionCounts counts(/*total=*/5, /*per_network=*/2);
  const PeerNetwork a = Network("10.0.0.1"), b = Network("2001:db8::1"), c = Network("10.0.0.2");
  EXPECT_TRUE(counts.Enter(a));
  EXPECT_TRUE(counts.Enter(a));
  EXPECT_EQ(counts.TryEnter(a), SharedConnectionCounts::Entrance::kAtLimit);
  EXPECT_FALSE(counts.Enter(a));
  EXPECT_TRUE(counts.Enter(b));
  EXPECT_TRUE(counts.Enter(Network("2001:db8::2")));
  EXPECT_FALSE(counts.Enter(Network("2001:db8::3"))) << "the /64 counts as one";
  EXPECT_TRUE(counts.Enter(c));
  EXPECT_FALSE(counts.Enter(c)) << "the total";
  EXPECT_EQ(counts.TryEnter(c), SharedConnectionCounts::Entrance::kFull);
  EXPECT_EQ(counts.refused(), 3);
  counts.Leave(a);
  EXPECT_TRUE(counts.Enter(c));
  EXPECT_EQ(counts.count(), 5);
}

TEST(ConnectionCountsTest, ANewConnectionMayReplaceAnother) {
  SharedConnectionCounts counts(/*total=*/3, /*per_network=*/2);
  const PeerNetwork a = Network("10.0.0.1"), b = Network("10.0.0.2");
  for (const PeerNetwork& network : {a, b, b}) ASSERT_TRUE(counts.Enter(network));
  EXPECT_FALSE(counts.Replace(a, b)) << "it would have three";
  EXPECT_TRUE(counts.Replace(b, b));
  EXPECT_TRUE(counts.Replace(b, a));
  EXPECT_FALSE(counts.Replace(b, a)) << "it has two now";
  EXPECT_EQ(counts.count(), 3);
}

TEST(ConnectionCountsTest, ANetworkMayHaveAQuarterByDefault) {
  for (const auto& [total, allowed] : {std::pair(16, 4), std::pair(3, 1)}) {
    SharedConnectionCounts counts(total, 0);
    int entered = 0;
    while (counts.Enter(Network("10.0.0.1"))) ++entered;
    EXPECT_EQ(entered, allowed);
  }
}

}  // namespace
}  // namespace rapt
