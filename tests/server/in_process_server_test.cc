// The server as an object, called by the client library over gRPC in the same process.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/host_limits.h"
#include "rapt/client.h"
#include "server/options.h"
#include "server/server.h"

namespace rapt {
namespace {

using client::Client;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// On free ports and without drain pauses, over the suite's transport.
absl::StatusOr<std::unique_ptr<Server>> CreateServer(const std::vector<const char*>& flags = {}) {
  std::vector<const char*> all = {"--grpc_address=127.0.0.1:0",
                                  "--metrics_address=127.0.0.1:0",
                                  "--http_address=",
                                  "--threads=2",
                                  "--memory_budget_bytes=67108864",
                                  "--drain_pause=0",
                                  "--drain_refusal_time=0"};
  all.insert(all.end(), flags.begin(), flags.end());
  const auto no_environment = [](const char*) -> const char* { return nullptr; };
  const absl::StatusOr<Options> options = ParseOptions(all, no_environment, HostLimits{});
  if (!options.ok()) return options.status();
  return Server::Create(*options);
}

absl::Status Start(Server& server) {
  return server.Start([] { return false; });
}

std::unique_ptr<Server> StartedServer() {
  absl::StatusOr<std::unique_ptr<Server>> server = CreateServer();
  EXPECT_TRUE(server.ok()) << server.status();
  EXPECT_TRUE(Start(**server).ok());
  return *std::move(server);
}

// Without retries.
absl::StatusOr<std::unique_ptr<Client>> ClientOf(const Server& server) {
  return Client::Connect(server.grpc_address(), {.retries = {.max_attempts = 1}});
}

// Checks that values of 3 give an output of 3.
absl::Status AttendToThrees(Client& client) {
  const std::vector<float> query = {1, -1, 0.5, 2};
  const std::vector<float> threes(8, 3);
  const absl::StatusOr<client::AttendResult> result =
      client.Attend({.q = client::View<float>({1, 1, 1, 4}, query),
                     .k = client::View<float>({1, 1, 2, 4}, threes),
                     .v = client::View<float>({1, 1, 2, 4}, threes)});
  if (!result.ok()) return result.status();
  EXPECT_THAT(result->y.shape(), ElementsAre(1, 1, 1, 4));
  EXPECT_THAT(result->y.values<float>(), Each(3));
  return absl::OkStatus();
}

TEST(InProcessServerTest, AnswersCallsUntilItDrains) {
  const std::unique_ptr<Server> server = StartedServer();
  EXPECT_THAT(server->grpc_address(), ::testing::MatchesRegex("127\\.0\\.0\\.1:[1-9][0-9]*"));
  EXPECT_EQ(server->security(), "plaintext");
  const auto client = ClientOf(*server);
  ASSERT_TRUE(client.ok()) << client.status();
  EXPECT_EQ(AttendToThrees(**client), absl::OkStatus());
  const absl::StatusOr<client::ServerInfo> info = (*client)->GetServerInfo();
  ASSERT_TRUE(info.ok()) << info.status();
  EXPECT_EQ(info->memory_budget_bytes, 67108864);
  server->Drain();
  EXPECT_EQ(server->open_calls(), 0);
  EXPECT_EQ(AttendToThrees(**client).code(), absl::StatusCode::kUnavailable);
}

TEST(InProcessServerTest, ServersOfOneProcessAreIndependent) {
  std::unique_ptr<Server> first = StartedServer();
  const std::unique_ptr<Server> second = StartedServer();
  EXPECT_NE(first->grpc_address(), second->grpc_address());
  const auto client = ClientOf(*second);
  ASSERT_TRUE(client.ok()) << client.status();
  first->Drain();
  first.reset();
  EXPECT_EQ(AttendToThrees(**client), absl::OkStatus());
  second->Drain();
}

TEST(InProcessServerTest, DestructionWithoutADrainShutsItDown) {
  std::unique_ptr<Server> server = StartedServer();
  const auto client = ClientOf(*server);
  ASSERT_TRUE(client.ok()) << client.status();
  server.reset();
  EXPECT_EQ(AttendToThrees(**client).code(), absl::StatusCode::kUnavailable);
}

TEST(InProcessServerTest, OptionsThatDoNotFitTheMachineFailBeforeItListens) {
  const absl::Status without_device = CreateServer({"--backend=cudnn"}).status();
  EXPECT_EQ(without_device.code(), absl::StatusCode::kFailedPrecondition) << without_device;
  const absl::Status small_budget = CreateServer({"--memory_budget_bytes=1000"}).status();
  EXPECT_EQ(small_budget.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(small_budget.message()), HasSubstr("--memory_budget_bytes is 1000"));
}

TEST(InProcessServerTest, AnAddressInUseIsUnavailable) {
  const std::unique_ptr<Server> server = StartedServer();
  const std::string address = "--grpc_address=" + server->grpc_address();
  const absl::StatusOr<std::unique_ptr<Server>> second = CreateServer({address.c_str()});
  ASSERT_TRUE(second.ok()) << second.status();
  const absl::Status status = Start(**second);
  EXPECT_EQ(status.code(), absl::StatusCode::kUnavailable);
  EXPECT_THAT(std::string(status.message()), HasSubstr(server->grpc_address()));
}

}  // namespace
}  // namespace rapt
