// All health interfaces of a server agree, even if its threads hang.
#include <dirent.h>
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <chrono>
#include <cstring>
#include <fstream>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/grpc/health/v1/health.grpc.pb.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "tests/support/loopback.h"
#include "tests/support/metrics_page.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using grpc::health::v1::Health;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using inference::GRPCInferenceService;

std::vector<pid_t> ThreadsNamed(pid_t process, const std::string& name) {
  std::vector<pid_t> threads;
  const std::string folder = absl::StrCat("/proc/", process, "/task/");
  DIR* const tasks = opendir(folder.c_str());
  EXPECT_NE(tasks, nullptr);
  while (const dirent* task = readdir(tasks)) {
    std::string comm;
    std::ifstream(absl::StrCat(folder, task->d_name, "/comm")) >> comm;
    if (comm == name) threads.push_back(static_cast<pid_t>(std::stol(task->d_name)));
  }
  closedir(tasks);
  return threads;
}

// Stops the server's threads of a name from construction to destruction. REQUIRES: both on the same
// thread, because only the tracing thread can resume them.
class HungThreads {
 public:
  explicit HungThreads(const ServerProcess& server, const std::string& name = "rapt-compute")
      : threads_(ThreadsNamed(server.pid(), name)) {
    for (const pid_t thread : threads_) {
      EXPECT_EQ(ptrace(PTRACE_SEIZE, thread, nullptr, nullptr), 0) << strerror(errno);
      EXPECT_EQ(ptrace(PTRACE_INTERRUPT, thread, nullptr, nullptr), 0) << strerror(errno);
      int status = 0;
      EXPECT_EQ(waitpid(thread, &status, __WALL), thread);
      EXPECT_TRUE(WIFSTOPPED(status));
    }
  }
  ~HungThreads() {
    for (const pid_t thread : threads_) {
      EXPECT_EQ(ptrace(PTRACE_DETACH, thread, nullptr, nullptr), 0) << strerror(errno);
    }
  }
  HungThreads(const HungThreads&) = delete;
  HungThreads& operator=(const HungThreads&) = delete;

  size_t count() const { return threads_.size(); }

 private:
  const std::vector<pid_t> threads_;
};

// --- Probes --------------------------------------------------------------------------------------

bool IsOpen(int connection) {
  char byte;
  return recv(connection, &byte, 1, MSG_DONTWAIT) < 0 && errno == EAGAIN;
}

TEST(ProbeTest, SilentConnectionsDoNotDelayProbes) {
  const ServerProcess server;
  // Retried if a slow machine let the server time out some of the silent connections.
  for (int tries = 0; tries < 20; ++tries) {
    std::vector<int> silent;
    for (int n = 0; n < 8; ++n) silent.push_back(ConnectTo(server.metrics_address()));
    EXPECT_TRUE(absl::StartsWith(HttpGet(server.metrics_address(), "/healthz"), "HTTP/1.1 200 "));
    const bool waited_for_none = std::all_of(silent.begin(), silent.end(), IsOpen);
    for (const int connection : silent) close(connection);
    if (waited_for_none) return;
  }
  FAIL() << "the probe was answered when silent connections had been closed";
}

// Queries the health of a server through all interfaces.
class Prober {
 public:
  explicit Prober(const ServerProcess& server)
      : server_(server),
        channel_(grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials())),
        health_(Health::NewStub(channel_)),
        oip_(GRPCInferenceService::NewStub(channel_)) {}

  bool HttpReady() const {
    return absl::StartsWith(HttpGet(server_.metrics_address(), "/readyz"), "HTTP/1.1 200 ");
  }

  // Readiness by interface name.
  std::vector<std::pair<std::string, bool>> Ready() const {
    std::vector<std::pair<std::string, bool>> answers = {
        {"/readyz", HttpReady()}, {"rapt_ready", ReadMetric(server_, "rapt_ready") == 1}};
    for (const char* service : {"", "inference.GRPCInferenceService", "rapt.v1.AttentionService"}) {
      HealthCheckRequest request;
      request.set_service(service);
      HealthCheckResponse response;
      grpc::ClientContext context;
      EXPECT_TRUE(health_->Check(&context, request, &response).ok()) << service;
      answers.emplace_back(absl::StrCat("Check '", service, "'"),
                           response.status() == HealthCheckResponse::SERVING);
    }
    {
      inference::ServerReadyResponse response;
      grpc::ClientContext context;
      EXPECT_TRUE(oip_->ServerReady(&context, {}, &response).ok());
      answers.emplace_back("ServerReady", response.ready());
    }
    inference::ModelReadyRequest request;
    request.set_name("attention");
    inference::ModelReadyResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(oip_->ModelReady(&context, request, &response).ok());
    answers.emplace_back("ModelReady", response.ready());
    return answers;
  }

  void ExpectReady(bool ready) const {
    for (const auto& [way, answer] : Ready()) EXPECT_EQ(answer, ready) << way;
  }

  void ExpectLive() const {
    EXPECT_TRUE(absl::StartsWith(HttpGet(server_.metrics_address(), "/healthz"), "HTTP/1.1 200 "));
    inference::ServerLiveResponse response;
    grpc::ClientContext context;
    EXPECT_TRUE(oip_->ServerLive(&context, {}, &response).ok());
    EXPECT_TRUE(response.live());
  }

  // Returns a stream that receives every change.
  std::unique_ptr<grpc::ClientReader<HealthCheckResponse>> Watch(
      grpc::ClientContext& context) const {
    return health_->Watch(&context, {});
  }

 private:
  const ServerProcess& server_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<Health::Stub> health_;
  const std::unique_ptr<GRPCInferenceService::Stub> oip_;
};

HealthCheckResponse::ServingStatus Next(grpc::ClientReader<HealthCheckResponse>& watch) {
  HealthCheckResponse response;
  EXPECT_TRUE(watch.Read(&response)) << "the watch ended";
  return response.status();
}

// The log follows the state, which is seen first.
void ExpectLogged(const ServerProcess& server, const std::string& text) {
  const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (!absl::StrContains(server.Log(), text) && std::chrono::steady_clock::now() < end) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
  }
  EXPECT_THAT(server.Log(), ::testing::HasSubstr(text));
}

TEST(HealthTest, HungThreadsAreReportedUntilTheyContinue) {
  const ServerProcess server({"--threads=2", "--stall_timeout=2s"});
  const Prober prober(server);
  prober.ExpectReady(true);
  grpc::ClientContext context;
  const auto watch = prober.Watch(context);
  EXPECT_EQ(Next(*watch), HealthCheckResponse::SERVING);
  {
    const HungThreads hung(server);
    EXPECT_EQ(hung.count(), 2u);
    EXPECT_EQ(Next(*watch), HealthCheckResponse::NOT_SERVING);
    prober.ExpectReady(false);
    prober.ExpectLive();
    ExpectLogged(server, "not ready reason=\"the compute threads");
  }
  EXPECT_EQ(Next(*watch), HealthCheckResponse::SERVING);
  prober.ExpectReady(true);
  context.TryCancel();
  watch->Finish();
}

// That of gRPC or that of HTTP.
class HungNetworkTest : public ::testing::TestWithParam<const char*> {};

TEST_P(HungNetworkTest, IsReportedUntilItContinues) {
  const ServerProcess server({"--threads=2", "--stall_timeout=2s"});
  const auto wait_for = [&server](const std::string& status) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (!absl::StrContains(HttpGet(server.metrics_address(), "/readyz"), status)) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << status;
      std::this_thread::sleep_for(std::chrono::milliseconds(50));
    }
  };
  wait_for("HTTP/1.1 200");
  {
    const HungThreads hung(server, GetParam());
    EXPECT_EQ(hung.count(), 1u);
    wait_for("HTTP/1.1 503");
    ExpectLogged(server, "not ready reason=\"the network threads");
  }
  wait_for("HTTP/1.1 200");
}

INSTANTIATE_TEST_SUITE_P(, HungNetworkTest, ::testing::Values("rapt-wire", "rapt-http"),
                         [](const auto& info) {
                           return info.param == std::string("rapt-wire") ? "OfGrpc" : "OfHttp";
                         });

// Self-attention of one head.
inference::ModelInferRequest Call(int64_t length) {
  inference::ModelInferRequest request;
  request.set_model_name("attention");
  const std::vector<float> values(static_cast<size_t>(length * 64), 0.5f);
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {int64_t{1}, int64_t{1}, length, int64_t{64}}) input.add_shape(axis);
    request.add_raw_input_contents(values.data(), values.size() * sizeof(float));
  }
  return request;
}

TEST(HealthTest, OverloadDoesNotAffectReadiness) {
  constexpr int kCallers = 16, kRefusals = 100;
  const ServerProcess server({"--backend=reference", "--threads=1", "--max_queued_requests=2",
                              "--memory_budget_bytes=16777216"});
  const Prober prober(server);
  const inference::ModelInferRequest request = Call(1024);  // some 100 ms of work
  std::atomic<int> refused{0};
  std::vector<std::thread> callers;
  for (int n = 0; n < kCallers; ++n) {
    callers.emplace_back([&] {
      const auto stub = GRPCInferenceService::NewStub(
          grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
      while (refused < kRefusals) {
        grpc::ClientContext context;
        inference::ModelInferResponse response;
        const grpc::Status status = stub->ModelInfer(&context, request, &response);
        if (status.error_code() == grpc::StatusCode::RESOURCE_EXHAUSTED) ++refused;
      }
    });
  }
  while (refused < kRefusals) {
    prober.ExpectReady(true);
    prober.ExpectLive();
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_THAT(server.Log(), ::testing::Not(::testing::HasSubstr("not ready")));
}

}  // namespace
}  // namespace rapt::test
