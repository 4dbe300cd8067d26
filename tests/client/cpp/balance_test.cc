// One client and several servers: calls are balanced, and none is lost when a server dies.
#include <gtest/gtest.h>

#include <csignal>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "rapt/client.h"
#include "tests/support/callers.h"
#include "tests/support/server_process.h"

namespace rapt::client {
namespace {

using test::Callers;
using test::ServerProcess;

constexpr int kServers = 3;
constexpr int kCallers = 4;

class BalanceTest : public testing::Test {
 protected:
  BalanceTest() {
    std::string address = "ipv4:";
    for (int i = 0; i < kServers; ++i) {
      servers_.push_back(std::make_unique<ServerProcess>());
      absl::StrAppend(&address, i == 0 ? "" : ",", servers_.back()->grpc_address());
    }
    auto connected = Client::Connect(address);
    EXPECT_TRUE(connected.ok()) << connected.status();
    if (connected.ok()) client_ = *std::move(connected);
  }

  absl::Status Attend() {
    const std::vector<float> x(2 * 8 * 4, 0.5f);
    const auto tokens = View<float>({1, 2, 8, 4}, x);
    const auto result = client_->Attend({.q = tokens, .k = tokens, .v = tokens});
    if (!result.ok()) return result.status();
    for (float y : result->y.values<float>()) {
      if (y != 0.5f) return absl::InternalError(absl::StrCat("expected a mean of 0.5, got ", y));
    }
    return absl::OkStatus();
  }

  std::vector<std::unique_ptr<ServerProcess>> servers_;
  std::unique_ptr<Client> client_;
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

TEST_F(BalanceTest, EveryServerGetsCalls) {
  // More calls than connections times servers, so that each server is chosen once all connections
  // are established.
  for (int i = 0; i < 200; ++i) ASSERT_TRUE(Attend().ok());
  for (int i = 0; i < kServers; ++i) EXPECT_GT(ServedCalls(*servers_[i]), 0) << "server " << i;
}

TEST_F(BalanceTest, NoCallIsLostWhenAServerIsKilled) {
  Callers callers(kCallers, [this] { return Attend(); });
  callers.WaitForMore(100);
  servers_[0]->Signal(SIGKILL);
  EXPECT_EQ(servers_[0]->Wait(), -SIGKILL);
  callers.WaitForMore(500);
  EXPECT_EQ(callers.Stop(), absl::OkStatus());
}

}  // namespace
}  // namespace rapt::client
