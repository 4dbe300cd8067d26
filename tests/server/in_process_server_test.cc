// The server as an object, called by the client library over gRPC in the same process.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/types/span.h"
#include "base/host_limits.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "rapt/client.h"
#include "server/options.h"
#include "server/server.h"

namespace rapt {
namespace {

using client::Client;
using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Pointwise;

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
  const absl::StatusOr<Options> options = ParseOptions(all, {}, HostLimits{});
  if (!options.ok()) return options.status();
  return Server::Create(*options);
}

absl::Status Start(Server& server) {
  return server.Start([] { return false; });
}

std::unique_ptr<Server> StartedServer(const std::vector<const char*>& flags = {}) {
  absl::StatusOr<std::unique_ptr<Server>> server = CreateServer(flags);
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

// A server with the layer "window": Luong's dot products of [B, S, 2], without weights.
class InProcessLayerTest : public ::testing::Test {
 protected:
  InProcessLayerTest() {
    std::filesystem::create_directories(folder_ / "window");
    std::ofstream(folder_ / "window/model.safetensors") << std::string("\2\0\0\0\0\0\0\0{}", 10);
    std::ofstream(folder_ / "window/config.json")
        << R"({"hidden_size": 2, "sliding_window": 2, "rapt": {"naming": "plain", "is_causal": true}})";
    const std::string repository = absl::StrCat("--model_repository=", folder_.string());
    server_ = StartedServer({repository.c_str(), "--kv_cache_bytes=16777216"});
    stub_ = inference::GRPCInferenceService::NewStub(
        grpc::CreateChannel(server_->grpc_address(), grpc::InsecureChannelCredentials()));
  }
  ~InProcessLayerTest() override { std::filesystem::remove_all(folder_); }

  // Appends Y of a step of the sequence 7 to y_.
  grpc::Status Step(absl::Span<const float> query, bool starts, bool ends) {
    inference::ModelInferRequest request;
    request.set_model_name("window");
    auto& parameters = *request.mutable_parameters();
    parameters["sequence_id"].set_int64_param(7);
    parameters["sequence_start"].set_bool_param(starts);
    parameters["sequence_end"].set_bool_param(ends);
    auto& input = *request.add_inputs();
    input.set_name("query");
    input.set_datatype("FP32");
    const auto tokens = static_cast<int64_t>(query.size() / 2);
    for (const int64_t axis : {int64_t{1}, tokens, int64_t{2}}) input.add_shape(axis);
    request.add_raw_input_contents(reinterpret_cast<const char*>(query.data()),
                                   query.size() * sizeof(float));
    inference::ModelInferResponse response;
    grpc::ClientContext context;
    grpc::Status status = stub_->ModelInfer(&context, request, &response);
    if (!status.ok()) return status;
    const std::string& bytes = response.raw_output_contents(0);
    EXPECT_EQ(bytes.size(), query.size() * sizeof(float));
    const size_t before = y_.size();
    y_.resize(before + query.size());
    bytes.copy(reinterpret_cast<char*>(y_.data() + before), query.size() * sizeof(float));
    return status;
  }

  const std::filesystem::path folder_ =
      testing::TempDir() + "in_process_server_test." + std::to_string(getpid());
  std::unique_ptr<Server> server_;
  std::unique_ptr<inference::GRPCInferenceService::Stub> stub_;
  std::vector<float> y_;
};

// Each token but the first is a mean of itself and the token before, by weights 1 / (1 + e^(s -
// t)).
constexpr float kTokens[] = {1, 0, 0, 1, 0, 3, 0, 5};
const std::vector<float> kWant = {1, 0, 0.26894143f, 0.7310586f, 0, 2.9950547f, 0, 4.9999094f};

TEST_F(InProcessLayerTest, AnswersACall) {
  const auto client = ClientOf(*server_);
  ASSERT_TRUE(client.ok()) << client.status();
  const auto result = (*client)->Infer(
      {.model = "window", .inputs = {{"query", client::View<float>({1, 4, 2}, kTokens)}}});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_THAT(result->outputs.at("Y").values<float>(), Pointwise(FloatNear(1e-5), kWant));
}

TEST_F(InProcessLayerTest, AnswersASequence) {
  EXPECT_TRUE(Step({kTokens, 4}, true, false).ok());
  EXPECT_TRUE(Step({kTokens + 4, 2}, false, false).ok());
  EXPECT_TRUE(Step({kTokens + 6, 2}, false, true).ok());
  EXPECT_THAT(y_, Pointwise(FloatNear(1e-5), kWant));
  EXPECT_THAT(Step({kTokens, 2}, false, false).error_message(),
              HasSubstr("must specify the START flag"));
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
