// The client library and the real rapt-server with shared memory.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <csignal>
#include <filesystem>
#include <memory>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "client/cpp/connections.h"
#include "client/cpp/deadline.h"
#include "client/cpp/shared_regions.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "rapt/client.h"
#include "tests/support/server_process.h"

namespace rapt::client {
namespace {

using inference::GRPCInferenceService;
using test::ServerProcess;
using ::testing::HasSubstr;

std::unique_ptr<Client> MustConnect(const std::string& address, const Options& options = {}) {
  auto client = Client::Connect(address, options);
  EXPECT_TRUE(client.ok()) << client.status();
  return *std::move(client);
}

// A call with 8 heads and 256 KiB each of Q, K and V, which owns its tensors.
struct LargeCall {
  explicit LargeCall(float first = 0.25f) {
    for (size_t n = 0; n < x.size(); ++n) {
      x[n] = first + static_cast<float>(n * 7919 % 1000) / 1000;
    }
  }
  AttendCall call() const {
    const TensorView view = View<float>({1, 8, 128, 64}, x);
    return {.q = view, .k = view, .v = view, .causal = true};
  }

  std::vector<float> x = std::vector<float>(8 * 128 * 64);
};

std::string BytesOf(const Tensor& tensor) {
  return {reinterpret_cast<const char*>(tensor.bytes().data()), tensor.bytes().size()};
}

// Returns the number of regions registered with the server.
int RegionsAt(const std::string& address) {
  const auto stub = GRPCInferenceService::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  inference::SystemSharedMemoryStatusResponse response;
  EXPECT_TRUE(stub->SystemSharedMemoryStatus(&context, {}, &response).ok());
  return static_cast<int>(response.regions().size());
}

class LibrarySharedMemoryTest : public ::testing::Test {
 protected:
  const ServerProcess server_{{"--allow_shared_memory"}};
};

TEST_F(LibrarySharedMemoryTest, GivesTheSameBitsAsTheMessage) {
  const auto shared = MustConnect(server_.grpc_address());
  const auto by_message = MustConnect(server_.grpc_address(), {.shared_memory = false});
  const LargeCall large;
  std::vector<AttendCall> calls(4, large.call());
  calls[1].wants_lse = true;
  calls[1].score_output = ScoreOutput::kWeights;
  calls[1].wants_present = true;
  const std::vector<int64_t> lengths = {100};
  calls[2].key_lengths = lengths;
  const std::vector<int32_t> mask(128 * 128, 1);
  calls[2].mask = View<int32_t>({128, 128}, mask);
  for (TensorView* view : {&calls[3].q, &calls[3].k, &calls[3].v}) view->shape = {1, 128, 8 * 64};
  calls[3].query_heads = calls[3].kv_heads = 8;
  for (size_t n = 0; n < calls.size(); ++n) {
    const auto got = shared->Attend(calls[n]);
    const auto want = by_message->Attend(calls[n]);
    ASSERT_TRUE(got.ok() && want.ok()) << n << ": " << got.status() << ", " << want.status();
    EXPECT_EQ(got->path, Path::kSharedMemory) << n;
    EXPECT_EQ(want->path, Path::kMessage) << n;
    EXPECT_EQ(got->y.shape(), want->y.shape()) << n;
    EXPECT_TRUE(BytesOf(got->y) == BytesOf(want->y)) << n;
    if (n != 1) continue;
    EXPECT_TRUE(BytesOf(*got->lse) == BytesOf(*want->lse));
    EXPECT_TRUE(BytesOf(*got->scores) == BytesOf(*want->scores));
    EXPECT_TRUE(BytesOf(*got->present_value) == BytesOf(*want->present_value));
  }
}

TEST_F(LibrarySharedMemoryTest, ReusesItsRegionAndUnregistersItAtTheEnd) {
  auto client = MustConnect(server_.grpc_address());
  const LargeCall large;
  std::vector<AttendResult> kept;
  for (int n = 0; n < 5; ++n) kept.push_back(client->Attend(large.call()).value());
  for (const AttendResult& result : kept) {
    EXPECT_EQ(result.path, Path::kSharedMemory);
    EXPECT_TRUE(BytesOf(result.y) == BytesOf(kept[0].y)) << "a result is independent of the region";
  }
  EXPECT_EQ(RegionsAt(server_.grpc_address()), 1);
  for (const auto& file : std::filesystem::directory_iterator("/dev/shm")) {
    // The objects of other tests end with a number.
    const std::string name = file.path().filename();
    EXPECT_FALSE(absl::StartsWith(name, "rapt-") && name.size() == 37) << name << " is left behind";
  }
  client.reset();
  EXPECT_EQ(RegionsAt(server_.grpc_address()), 0);
}

TEST_F(LibrarySharedMemoryTest, EachOfManyThreadsHasItsOwnRegion) {
  const auto client = MustConnect(server_.grpc_address());
  std::vector<std::thread> threads;
  for (int n = 0; n < 12; ++n) {
    threads.emplace_back([&client, n] {
      const LargeCall large(static_cast<float>(n));
      std::string first;
      for (int round = 0; round < 5; ++round) {
        const auto result = client->Attend(large.call());
        ASSERT_TRUE(result.ok()) << result.status();
        if (round == 0) first = BytesOf(result->y);
        EXPECT_TRUE(BytesOf(result->y) == first) << "thread " << n << ", round " << round;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(RegionsAt(server_.grpc_address()), 8);
}

TEST_F(LibrarySharedMemoryTest, ASmallCallIsSentAsAMessage) {
  const auto client = MustConnect(server_.grpc_address());
  const std::vector<float> x(24, 0.5f);
  const TensorView view = View<float>({1, 2, 3, 4}, x);
  const auto result = client->Attend({.q = view, .k = view, .v = view});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->path, Path::kMessage);
}

TEST_F(LibrarySharedMemoryTest, AnInvalidCallGetsTheUsualError) {
  const auto client = MustConnect(server_.grpc_address());
  const LargeCall large;
  AttendCall wrong = large.call();
  wrong.k.shape = {1, 8, 256, 32};
  const auto refused = client->Attend(wrong);
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.status().message()), HasSubstr("32"));
  wrong.k.shape = {1, 8, 1, 32};
  EXPECT_THAT(std::string(client->Attend(wrong).status().message()), HasSubstr("its data has"));
  const auto right = client->Attend(large.call());
  ASSERT_TRUE(right.ok()) << right.status();
  EXPECT_EQ(right->path, Path::kSharedMemory);
}

TEST(LibrarySharedMemoryOffTest, AServerThatDoesNotAllowItGetsMessages) {
  const ServerProcess server;
  const auto client = MustConnect(server.grpc_address());
  const LargeCall large;
  for (int n = 0; n < 2; ++n) {
    const auto result = client->Attend(large.call());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->path, Path::kMessage);
  }
}

// Stops the server process until destruction.
class Frozen {
 public:
  explicit Frozen(ServerProcess& server) : server_(server) {
    server_.Signal(SIGSTOP);
    // The signal stops one thread after another.
    siginfo_t stopped = {};
    EXPECT_EQ(waitid(P_PID, server_.pid(), &stopped, WSTOPPED), 0);
  }
  ~Frozen() { server_.Signal(SIGCONT); }

 private:
  ServerProcess& server_;
};

// An unanswered call by a separate client.
class UnansweredCall {
 public:
  explicit UnansweredCall(const ServerProcess& server)
      : client_(MustConnect(server.grpc_address())) {}

  // REQUIRES: the server is frozen.
  void Start(std::chrono::milliseconds timeout) {
    const TensorView view = View<float>({1, 1, 1, 1}, x_);
    client_->AttendAsync({.q = view, .k = view, .v = view}, {.timeout = timeout},
                         [this](const auto&) { has_ended_ = true; });
  }

  bool has_ended() const { return has_ended_; }

 private:
  const std::vector<float> x_ = {1};
  std::atomic<bool> has_ended_ = false;
  const std::unique_ptr<Client> client_;  // waits for the callback
};

// Unregistering a region from a frozen server fails after a second. Another call with this shorter
// deadline shows that no call waits for it.
constexpr std::chrono::milliseconds kLessThanUnregistration{900};

TEST(LibrarySharedMemoryFrozenTest, ADeadlineEndsTheCall) {
  ServerProcess server({"--allow_shared_memory"});
  const auto client = MustConnect(server.grpc_address());
  const LargeCall large;
  EXPECT_EQ(client->Attend(large.call()).value().path, Path::kSharedMemory);
  UnansweredCall other(server);
  const Frozen frozen(server);
  other.Start(kLessThanUnregistration);
  const auto result = client->Attend(large.call(), {.timeout = std::chrono::milliseconds(100)});
  EXPECT_FALSE(other.has_ended());
  EXPECT_EQ(result.status().code(), absl::StatusCode::kDeadlineExceeded);
}

TEST(LibrarySharedMemoryFrozenTest, AStopEndsTheCall) {
  ServerProcess server({"--allow_shared_memory"});
  const LargeCall large;
  for (const bool has_region : {true, false}) {
    const auto client = MustConnect(server.grpc_address());
    if (has_region) {
      EXPECT_EQ(client->Attend(large.call()).value().path, Path::kSharedMemory);
    }
    UnansweredCall other(server);
    const Frozen frozen(server);
    other.Start(kLessThanUnregistration);
    std::stop_source stop;
    stop.request_stop();
    const auto result = client->Attend(large.call(), {.stop = stop.get_token()});
    EXPECT_FALSE(other.has_ended()) << has_region;
    EXPECT_EQ(result.status().code(), absl::StatusCode::kCancelled) << has_region;
  }
}

TEST(LibrarySharedMemoryFrozenTest, DestructionUnregistersAllRegionsAtOnce) {
  constexpr int kRegions = 8;
  ServerProcess server({"--allow_shared_memory"});
  Connections connections(server.grpc_address(), {}, grpc::InsecureChannelCredentials());
  auto regions = std::make_unique<SharedRegions>(server.grpc_address(), connections);
  std::vector<std::unique_ptr<SharedRegion>> taken;
  for (int n = 0; n < kRegions; ++n) {
    taken.push_back(regions->Take(1, Deadline::After(std::chrono::minutes(1)), {}));
    ASSERT_NE(taken.back(), nullptr);
  }
  for (auto& region : taken) regions->Return(std::move(region));
  UnansweredCall other(server);
  const Frozen frozen(server);
  other.Start(kRegions * std::chrono::milliseconds(900));
  regions.reset();
  EXPECT_FALSE(other.has_ended());
}

TEST(LibrarySharedMemoryRestartTest, RecoversWhenARestartedServerLacksTheRegion) {
  std::string folder = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
  ASSERT_NE(mkdtemp(folder.data()), nullptr);
  const std::string path = folder + "/socket";
  const std::vector<std::string> flags = {"--allow_shared_memory",
                                          absl::StrCat("--unix_socket=", path)};
  {
    auto first = std::make_unique<ServerProcess>(flags);
    const auto client = MustConnect(absl::StrCat("unix:", path), {.retries = {.max_attempts = 30}});
    const LargeCall large;
    const auto before = client->Attend(large.call());
    ASSERT_TRUE(before.ok()) << before.status();
    EXPECT_EQ(before->path, Path::kSharedMemory);
    first->Signal(SIGKILL);
    first->Wait();
    const ServerProcess second(flags);
    for (int n = 0; n < 3; ++n) {
      const auto after = client->Attend(large.call(), {.timeout = std::chrono::seconds(30)});
      ASSERT_TRUE(after.ok()) << after.status();
      EXPECT_TRUE(BytesOf(after->y) == BytesOf(before->y));
    }
    EXPECT_EQ(client->Attend(large.call())->path, Path::kSharedMemory) << "registered again";
  }
  std::filesystem::remove_all(folder);
}

// A call could reach a server that has not registered the region.
TEST(SharedRegionsTest, SeveralServersGetMessages) {
  constexpr int kServers = 3;
  std::vector<std::unique_ptr<ServerProcess>> servers;
  std::string address = "ipv4:";
  for (int n = 0; n < kServers; ++n) {
    servers.push_back(
        std::make_unique<ServerProcess>(std::vector<std::string>{"--allow_shared_memory"}));
    absl::StrAppend(&address, n == 0 ? "" : ",", servers.back()->grpc_address());
  }
  const auto client = MustConnect(address);
  const LargeCall large;
  for (int n = 0; n < 2 * kServers; ++n) {
    const auto result = client->Attend(large.call());
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->path, Path::kMessage);
  }
  for (const auto& server : servers) EXPECT_EQ(RegionsAt(server->grpc_address()), 0);
}

TEST(SharedRegionsTest, RecognizesServersOnThisMachine) {
  for (const char* ours : {"127.0.0.1:1", "localhost:8001", "[::1]:2", "unix:/run/rapt.sock",
                           "unix:///run/rapt.sock", "dns:///localhost:1", "ipv4:127.0.0.1:5"}) {
    EXPECT_TRUE(IsSameMachine(ours)) << ours;
  }
  for (const char* others :
       {"10.0.0.1:1", "rapt.example:8001", "localhost.example:1", "dns:///rapt.example:1",
        "ipv4:10.0.0.1:127", "[2001:db8::1]:2", "ipv4:127.0.0.1:5,127.0.0.1:6"}) {
    EXPECT_FALSE(IsSameMachine(others)) << others;
  }
}

}  // namespace
}  // namespace rapt::client
