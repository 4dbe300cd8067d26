#include "rapt/placement.h"

#include <arpa/inet.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <resolv.h>

#include <algorithm>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "rapt/cache.h"
#include "tests/client/cpp/cache_tokens.h"
#include "tests/client/cpp/dns_server.h"
#include "tests/support/server_process.h"

namespace rapt::client {
namespace {

using test::DnsServer;
using test::ServerProcess;
using test::TwoLayers;
using testing::ElementsAre;
using testing::HasSubstr;

std::vector<std::string> Servers(int count) {
  std::vector<std::string> servers;
  for (int n = 0; n < count; ++n) servers.push_back(absl::StrCat("10.0.0.", n + 1, ":8001"));
  return servers;
}

std::string FirstOf(const std::vector<std::string>& servers, const std::string& name) {
  return servers[RankServers(servers, name)[0]];
}

// From the program in docs/kv-cache.md. Callers of different versions must agree: never change
// these.
TEST(PlacementWeightTest, IsTheSameInEveryVersion) {
  EXPECT_EQ(PlacementWeight("", ""), 13331581593930102267u);
  EXPECT_EQ(PlacementWeight("10.0.0.1:8001", "chat-17"), 16532629433776997899u);
  EXPECT_EQ(PlacementWeight("10.0.0.2:8001", "chat-17"), 10490065909127311598u);
  EXPECT_EQ(PlacementWeight("[fd00::7]:8001", "\xc3\xa9t\xc3\xa9"), 3795626683874021841u);
  // The zero byte keeps server and name apart.
  EXPECT_NE(PlacementWeight("ab", "c"), PlacementWeight("a", "bc"));
}

TEST(RankServersTest, IsTheSameInEveryVersion) {
  EXPECT_THAT(RankServers(Servers(5), "chat-17"), ElementsAre(0, 4, 2, 1, 3));
  EXPECT_THAT(RankServers({}, "chat-17"), ElementsAre());
  const std::vector<std::string> same = {"b", "a", "a"};
  EXPECT_EQ(RankServers(same, "x").size(), 3u);
}

TEST(RankServersTest, TheOrderOfTheServersDoesNotMatter) {
  std::vector<std::string> servers = Servers(6);
  std::map<std::string, std::string> placed;
  for (int n = 0; n < 100; ++n) placed[absl::StrCat(n)] = FirstOf(servers, absl::StrCat(n));
  do {
    for (const auto& [name, server] : placed) ASSERT_EQ(FirstOf(servers, name), server);
  } while (std::next_permutation(servers.begin(), servers.begin() + 4));
}

TEST(RankServersTest, NamesSpreadEvenly) {
  constexpr int kServers = 10, kNames = 20000;
  const std::vector<std::string> servers = Servers(kServers);
  std::map<std::string, int> names;
  for (int n = 0; n < kNames; ++n) ++names[FirstOf(servers, absl::StrCat("sequence-", n))];
  EXPECT_EQ(names.size(), servers.size());
  // 2000 each, with a standard deviation of 42.
  for (const auto& [server, count] : names) EXPECT_NEAR(count, kNames / kServers, 250) << server;
}

TEST(RankServersTest, OnlyTheNamesOfAServerThatLeavesMove) {
  const std::vector<std::string> servers = Servers(8);
  for (size_t gone = 0; gone < servers.size(); ++gone) {
    std::vector<std::string> left = servers;
    left.erase(left.begin() + static_cast<int>(gone));
    for (int n = 0; n < 500; ++n) {
      const std::string name = absl::StrCat("chat/", n);
      const std::vector<size_t> ranks = RankServers(servers, name);
      const size_t first = ranks[0] == gone ? ranks[1] : ranks[0];
      ASSERT_EQ(FirstOf(left, name), servers[first]);
    }
  }
}

TEST(RankServersTest, OnlyTheNamesOfAServerThatJoinsMove) {
  const std::vector<std::string> before = Servers(7), after = Servers(8);
  int moved = 0;
  for (int n = 0; n < 4000; ++n) {
    const std::string name = absl::StrCat("chat/", n), server = FirstOf(after, name);
    if (server == FirstOf(before, name)) continue;
    EXPECT_EQ(server, after.back());
    ++moved;
  }
  EXPECT_NEAR(moved, 4000 / 8, 100);
}

std::unique_ptr<ServerProcess> NewServer(const std::string& address = "127.0.0.1:0") {
  return std::make_unique<ServerProcess>(
      std::vector<std::string>{absl::StrCat("--grpc_address=", address), "--threads=1",
                               "--kv_cache_bytes=4194304", "--grace_period=0s"});
}

TEST(PlacementTest, ANameFindsItsCacheAgain) {
  const auto a = NewServer(), b = NewServer();
  std::set<std::string> used;
  std::map<std::string, std::string> ids;
  CacheOptions options = TwoLayers();
  for (const std::vector<std::string>& addresses :
       {std::vector{a->grpc_address(), b->grpc_address()},
        {b->grpc_address(), a->grpc_address()}}) {
    const auto servers = Placement::Connect(addresses);
    ASSERT_TRUE(servers.ok()) << servers.status();
    for (int n = 0; n < 20; ++n) {
      options.name = absl::StrCat("chat-", n);
      absl::StatusOr<Cache> cache = CreateCache(*(*servers)->Of(options.name), options);
      ASSERT_TRUE(cache.ok()) << cache.status();
      used.insert(FirstOf(addresses, options.name));
      const std::string id = cache->Release();
      EXPECT_EQ(ids.emplace(options.name, id).first->second, id);
    }
  }
  EXPECT_EQ(used.size(), 2u);
}

TEST(PlacementTest, RanksWrapAround) {
  const auto servers = Placement::Connect({"127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"});
  ASSERT_TRUE(servers.ok()) << servers.status();
  EXPECT_THAT((*servers)->servers(), ElementsAre("127.0.0.1:1", "127.0.0.1:2", "127.0.0.1:3"));
  std::set<std::shared_ptr<Client>> clients;
  for (size_t rank = 0; rank < 6; ++rank) clients.insert((*servers)->Of("x", rank));
  EXPECT_EQ(clients.size(), 3u);
  EXPECT_EQ((*servers)->Of("x", 4), (*servers)->Of("x", 1));
}

// Lets getaddrinfo() of this thread ask the test's server.
void ResolveBy(const DnsServer& dns) {
  ASSERT_EQ(res_init(), 0);
  _res.nscount = 1;
  _res.nsaddr_list[0].sin_family = AF_INET;
  _res.nsaddr_list[0].sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  _res.nsaddr_list[0].sin_port = htons(static_cast<uint16_t>(dns.port()));
}

TEST(PlacementTest, ADnsNameStandsForAllItsAddresses) {
  DnsServer dns;
  dns.SetAddresses({"127.0.0.2", "127.0.0.1"});
  ResolveBy(dns);
  const auto a = NewServer();
  const std::string port = a->grpc_address().substr(a->grpc_address().rfind(':'));
  const auto servers = Placement::Connect({absl::StrCat("dns:///rapt.test", port)});
  ASSERT_TRUE(servers.ok()) << servers.status();
  EXPECT_THAT((*servers)->servers(), ElementsAre("127.0.0.1" + port, "127.0.0.2" + port));
  std::string name = "x";
  while (FirstOf((*servers)->servers(), name) != "127.0.0.1" + port) name += "x";
  const std::shared_ptr<Client> before = (*servers)->Of(name);
  EXPECT_TRUE(before->GetServerInfo().ok());

  dns.SetAddresses({"127.0.0.1", "127.0.0.3"});
  ASSERT_TRUE((*servers)->Refresh().ok());
  EXPECT_THAT((*servers)->servers(), ElementsAre("127.0.0.1" + port, "127.0.0.3" + port));
  const std::vector<std::string> now = (*servers)->servers();
  std::string stays = "x";
  while (FirstOf(now, stays) != "127.0.0.1" + port) stays += "x";
  EXPECT_EQ((*servers)->Of(stays), before);

  dns.SetAddresses({});
  const absl::Status failed = (*servers)->Refresh();
  EXPECT_TRUE(absl::IsUnavailable(failed)) << failed;
  EXPECT_THAT(std::string(failed.message()), HasSubstr("dns:///rapt.test"));
  EXPECT_EQ((*servers)->servers(), now);
}

TEST(PlacementTest, BadAddressesAreNamed) {
  const auto message = [](const std::vector<std::string>& addresses) {
    const absl::Status status = Placement::Connect(addresses).status();
    EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
    return std::string(status.message());
  };
  EXPECT_EQ(message({}), "addresses is empty; there must be at least one");
  EXPECT_EQ(message({"a:1", "b:1", "a:1"}), "address a:1 is given twice");
  for (const char* address :
       {"dns:///rapt", "dns:///:8001", "dns:///rapt:", "dns:///rapt:grpc", "dns:///::1:8001"}) {
    EXPECT_EQ(message({address}),
              absl::StrCat("address is ", address, "; it must be dns:///NAME:PORT"));
  }
  EXPECT_THAT(message({""}), HasSubstr("address is empty"));
}

}  // namespace
}  // namespace rapt::client
