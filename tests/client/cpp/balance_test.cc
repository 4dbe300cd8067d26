// One client and several servers: calls are balanced, and none is lost when servers end, stop, or
// move to other addresses.
#include <gtest/gtest.h>

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "rapt/client.h"
#include "tests/client/cpp/dns_server.h"
#include "tests/support/callers.h"
#include "tests/support/certificates.h"
#include "tests/support/metrics_page.h"
#include "tests/support/server_process.h"

namespace rapt::client {
namespace {

using test::Callers;
using test::DnsServer;
using test::kDrainPause;
using test::kDrainRefusalTime;
using test::ServerProcess;

constexpr int kServers = 3;
constexpr int kCallers = 4;
constexpr RetryPolicy kNoRetries{.max_attempts = 1};

std::unique_ptr<Client> ConnectTo(const std::string& address, const Options& options = {}) {
  auto client = Client::Connect(address, options);
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

absl::Status Attend(Client& client, const CallOptions& options = {}) {
  const std::vector<float> x(2 * 8 * 4, 0.5f);
  const auto tokens = View<float>({1, 2, 8, 4}, x);
  const auto result = client.Attend({.q = tokens, .k = tokens, .v = tokens}, options);
  if (!result.ok()) return result.status();
  for (float y : result->y.values<float>()) {
    if (y != 0.5f) return absl::InternalError(absl::StrCat("expected a mean of 0.5, got ", y));
  }
  return absl::OkStatus();
}

// In four chunks.
absl::Status AttendStream(Client& client) {
  const std::vector<float> x(2 * 8 * 4, 0.5f);
  const auto tokens = View<float>({1, 2, 8, 4}, x);
  return client
      .AttendStream({.q = tokens, .k = tokens, .v = tokens}, {.query_chunk = 4, .key_chunk = 4})
      .status();
}

// Servers at an address of several.
class Servers {
 public:
  explicit Servers(const std::vector<std::string>& flags = {}) {
    for (int i = 0; i < kServers; ++i) servers_.push_back(std::make_unique<ServerProcess>(flags));
  }

  ServerProcess& operator[](size_t i) { return *servers_[i]; }
  std::string address() const {
    return absl::StrCat("ipv4:", absl::StrJoin(servers_, ",", [](std::string* out, const auto& s) {
                          absl::StrAppend(out, s->grpc_address());
                        }));
  }

 private:
  std::vector<std::unique_ptr<ServerProcess>> servers_;
};

// Returns how many calls a server has served, according to its log on exit.
int64_t ServedCalls(ServerProcess& server) {
  server.Terminate();
  EXPECT_EQ(server.Wait(), 0) << server.Log();
  const std::string log = server.Log();
  const size_t at = log.find("served_calls=");
  EXPECT_NE(at, std::string::npos) << log;
  return at == std::string::npos ? -1 : std::stoll(log.substr(at + 13));
}

TEST(BalanceTest, EveryServerGetsCalls) {
  Servers servers;
  const auto client = ConnectTo(servers.address());
  // More calls than connections times servers, so that each server is chosen once all connections
  // are established.
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(Attend(*client).ok());
  for (int i = 0; i < kServers; ++i) EXPECT_GT(ServedCalls(servers[i]), 0) << "server " << i;
}

TEST(BalanceTest, NoCallIsLostWhenAServerIsKilled) {
  Servers servers;
  const auto client = ConnectTo(servers.address());
  Callers callers(kCallers, [&client] { return Attend(*client); });
  callers.WaitForMore(100);
  servers[0].Signal(SIGKILL);
  EXPECT_EQ(servers[0].Wait(), -SIGKILL);
  callers.WaitForMore(500);
  EXPECT_EQ(callers.Stop(), absl::OkStatus());
}

// gRPC 1.51 sometimes begins a stream that GOAWAY refuses anew without its first messages, which
// then waits for them until it is evicted.
TEST(BalanceTest, StreamsDoNotWaitWhenAServerIsTerminated) {
  Servers servers({kDrainPause, kDrainRefusalTime});
  const auto client = ConnectTo(servers.address());
  Callers callers(2 * kCallers, [&client] {
    const absl::Status status = AttendStream(*client);
    return absl::IsUnavailable(status) ? absl::OkStatus() : status;
  });
  for (int i = 0; i + 1 < kServers; ++i) {
    callers.WaitForMore(100);
    servers[i].Terminate();
    EXPECT_EQ(servers[i].Wait(), 0) << servers[i].Log();
  }
  callers.WaitForMore(100);
  EXPECT_EQ(callers.Stop(), absl::OkStatus());
}

void ExpectNoCallIsLostWithoutRetries(Servers& servers, Options options) {
  options.retries = kNoRetries;
  const auto client = ConnectTo(servers.address(), options);
  Callers callers(kCallers, [&client] { return Attend(*client); });
  callers.WaitForMore(500);
  servers[0].Terminate();
  EXPECT_EQ(servers[0].Wait(), 0) << servers[0].Log();
  callers.WaitForMore(500);
  EXPECT_EQ(callers.Stop(), absl::OkStatus());
}

TEST(BalanceTest, WithoutRetriesNoCallIsLostWhenAServerIsTerminated) {
  Servers servers({kDrainPause, kDrainRefusalTime});
  ExpectNoCallIsLostWithoutRetries(servers, {});
}

TEST(BalanceTest, WithoutRetriesNoCallIsLostWithTlsAndTokens) {
  std::string pattern = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
  const std::filesystem::path folder = mkdtemp(pattern.data());
  const auto write = [&folder](const char* name, const std::string& text) {
    std::ofstream(folder / name) << text;
    return (folder / name).string();
  };
  const test::Authority authority;
  const test::Certificate certificate = authority.Issue({"rapt.test"});
  Servers servers(
      {kDrainPause, kDrainRefusalTime, absl::StrCat("--tls_cert=", write("cert", certificate.cert)),
       absl::StrCat("--tls_key=", write("key", certificate.key)),
       absl::StrCat("--token_file=",
                    write("tokens", absl::StrCat("me ", test::Sha256("token"), "\n")))});
  ExpectNoCallIsLostWithoutRetries(
      servers,
      {.tls = TlsOptions{.ca_file = write("ca", authority.cert()), .server_name = "rapt.test"},
       .token = "token"});
  std::filesystem::remove_all(folder);
}

TEST(BalanceTest, AServerThatIsNotReadyGetsNoCalls) {
  Servers servers({"--drain_pause=1h"});  // it accepts calls meanwhile, also on new connections
  const auto client = ConnectTo(servers.address(), {.retries = kNoRetries});
  Callers callers(kCallers, [&client] { return Attend(*client); });
  callers.WaitForMore(100);
  servers[0].Terminate();
  const auto served = [&servers] {
    return test::ReadMetric(servers[0], "rapt_requests_total", {{"code", "OK"}});
  };
  // It takes a moment until all connections know.
  double before;
  do {
    before = served();
    callers.WaitForMore(500);
  } while (served() != before);
  EXPECT_EQ(callers.Stop(), absl::OkStatus());
  for (int i = 0; i < kServers; ++i) {  // they would pause
    servers[i].Signal(SIGKILL);
    EXPECT_EQ(servers[i].Wait(), -SIGKILL);
  }
}

TEST(BalanceTest, AStoppedServerCostsAnAttemptAndNotTheDeadline) {
  Servers servers;
  const auto client = ConnectTo(servers.address());
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(Attend(*client).ok());
  servers[0].Signal(SIGSTOP);
  const auto begin = std::chrono::steady_clock::now();
  for (int i = 0; i < 200; ++i) {
    const absl::Status status = Attend(*client, {.timeout = std::chrono::hours(1)});
    EXPECT_TRUE(status.ok()) << status;
  }
  EXPECT_LT(std::chrono::steady_clock::now() - begin, std::chrono::minutes(1));
  servers[0].Signal(SIGCONT);
}

TEST(BalanceTest, AStoppedServerGetsCallsAgainWhenItContinues) {
  Servers servers;
  const auto client = ConnectTo(servers.address());
  servers[0].Signal(SIGSTOP);
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(Attend(*client).ok());
  servers[0].Signal(SIGCONT);
  const double before = test::ReadMetric(servers[0], "rapt_requests_total", {{"code", "OK"}});
  Callers callers(1, [&client] { return Attend(*client); });
  test::WaitForPage(servers[0], "calls after it continued", [before](const std::string& page) {
    return test::SumOnPage(page, "rapt_requests_total", {{"code", "OK"}}) > before;
  });
  EXPECT_EQ(callers.Stop(), absl::OkStatus());
}

// Servers on one port of several loopback addresses, and a name that resolves to some of them.
class NameTest : public testing::Test {
 protected:
  // Starts a server on 127.0.0.`host`.
  ServerProcess& Start(int host, std::vector<std::string> flags = {}) {
    flags.push_back(absl::StrCat("--grpc_address=127.0.0.", host, ":", port_));
    auto& server = servers_[host] = std::make_unique<ServerProcess>(flags);
    const std::string& address = server->grpc_address();
    port_ = std::stoi(address.substr(address.rfind(':') + 1));
    return *server;
  }

  std::string target() const { return dns_.TargetOf(port_); }

  DnsServer dns_;

 private:
  int port_ = 0;
  std::map<int, std::unique_ptr<ServerProcess>> servers_;
};

TEST_F(NameTest, AddressesWithoutAServerGetNoCalls) {
  Start(1);
  dns_.SetAddresses({"127.0.0.1", "127.0.0.2", "127.0.0.3"});
  const auto client = ConnectTo(target(), {.retries = kNoRetries});
  for (int i = 0; i < 50; ++i) EXPECT_EQ(Attend(*client), absl::OkStatus());
}

TEST_F(NameTest, AServerAddedToTheNameGetsCallsAndNoneIsLost) {
  const std::string age = "--max_connection_age=1s";
  Start(1, {age});
  Start(2, {age});
  dns_.SetAddresses({"127.0.0.1", "127.0.0.2"});
  const auto client = ConnectTo(target(), {.retries = kNoRetries});
  Callers callers(kCallers, [&client] { return Attend(*client); });
  callers.WaitForMore(100);
  const ServerProcess& added = Start(3, {age});
  dns_.SetAddresses({"127.0.0.1", "127.0.0.2", "127.0.0.3"});
  test::WaitForPage(added, "calls", [](const std::string& page) {
    return test::SumOnPage(page, "rapt_requests_total", {{"code", "OK"}}) > 0;
  });
  EXPECT_EQ(callers.Stop(), absl::OkStatus());
}

TEST_F(NameTest, CallsFollowANameWhoseServersAreAllReplaced) {
  ServerProcess& first = Start(1, {kDrainPause, kDrainRefusalTime});
  dns_.SetAddresses({"127.0.0.1"});
  const auto client = ConnectTo(target());
  Callers callers(kCallers, [&client] { return Attend(*client); });
  callers.WaitForMore(100);
  Start(2);
  dns_.SetAddresses({"127.0.0.2"});
  first.Terminate();
  EXPECT_EQ(first.Wait(), 0) << first.Log();
  callers.WaitForMore(500);
  EXPECT_EQ(callers.Stop(), absl::OkStatus());
}

}  // namespace
}  // namespace rapt::client
