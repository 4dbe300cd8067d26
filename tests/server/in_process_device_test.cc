// The server as an object, with a fake GPU.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "attention/cudnn/graph.h"
#include "base/host_limits.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "rapt/cache.h"
#include "rapt/client.h"
#include "server/options.h"
#include "server/server.h"
#include "tests/support/controlled_device.h"
#include "tests/support/loopback.h"
#include "tests/support/metrics_page.h"

namespace rapt {
namespace {

// The head sizes by which the device tells the requests apart. Requests of different head sizes are
// never computed by one run.
constexpr int64_t kLowSize = 64, kHighSize = 128;
constexpr int64_t kLength = 64;
constexpr uint64_t kLow = 15, kHigh = 1;
constexpr int kLowRequests = 8;

// Blocks the first run until Release(). Records the head size of each run.
class HeldDevice {
 public:
  void OnRun(const cudnn::SdpaGraph& graph) {
    sizes_.push_back(graph.head_size);  // there is one lane
    if (sizes_.size() > 1) return;
    running_.set_value();
    released_.get_future().wait();
  }
  void WaitUntilRunning() { running_.get_future().wait(); }
  void Release() { released_.set_value(); }
  // REQUIRES: no request is in flight.
  const std::vector<int64_t>& sizes() const { return sizes_; }

 private:
  std::promise<void> running_, released_;
  std::vector<int64_t> sizes_;
};

absl::StatusOr<std::unique_ptr<Server>> StartServer(const std::vector<const char*>& more) {
  std::vector<const char*> flags = {"--grpc_address=127.0.0.1:0",
                                    "--metrics_address=127.0.0.1:0",
                                    "--http_address=",
                                    "--threads=2",
                                    "--memory_budget_bytes=268435456",
                                    "--drain_pause=0",
                                    "--drain_refusal_time=0"};
  flags.insert(flags.end(), more.begin(), more.end());
  const absl::StatusOr<Options> options = ParseOptions(flags, {}, HostLimits{});
  if (!options.ok()) return options.status();
  absl::StatusOr<std::unique_ptr<Server>> server = Server::Create(*options);
  if (!server.ok()) return server.status();
  absl::Status status = (*server)->Start([] { return false; });
  if (!status.ok()) return status;
  return server;
}

// Zeros: two bytes an element.
std::string Zeros(int64_t size) { return std::string(static_cast<size_t>(kLength * size * 2), 0); }

absl::Status Attend(const std::string& address, int64_t size, uint64_t priority) {
  auto client = client::Client::Connect(address, {.retries = {.max_attempts = 1}});
  if (!client.ok()) return client.status();
  const std::string bytes = Zeros(size);
  const client::TensorView x = {client::DType::kBFloat16,
                                {1, 1, kLength, size},
                                {reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()}};
  return (*client)->Attend({.q = x, .k = x, .v = x, .priority = priority}).status();
}

absl::Status Infer(const std::string& address, int64_t size, uint64_t priority) {
  inference::ModelInferRequest request;
  request.set_model_name("attention");
  (*request.mutable_parameters())["priority"].set_uint64_param(priority);
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("BF16");
    for (const int64_t axis : {int64_t{1}, int64_t{1}, kLength, size}) input.add_shape(axis);
    request.add_raw_input_contents(Zeros(size));
  }
  const auto stub = inference::GRPCInferenceService::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  inference::ModelInferResponse response;
  const grpc::Status status = stub->ModelInfer(&context, request, &response);
  return absl::Status(static_cast<absl::StatusCode>(status.error_code()), status.error_message());
}

using SendRequest = absl::Status (*)(const std::string& address, int64_t size, uint64_t priority);

class PriorityTest : public ::testing::TestWithParam<SendRequest> {};

TEST_P(PriorityTest, AnUrgentRequestPrecedesWaitingOnes) {
  HeldDevice device;
  test::DeviceControls().on_graph = [&device](const cudnn::SdpaGraph& graph,
                                              const cudnn::ArenaLayout&) { device.OnRun(graph); };
  const absl::StatusOr<std::unique_ptr<Server>> server =
      StartServer({"--backend=cudnn", "--cudnn_memory_bytes=67108864",
                   "--cudnn_warm_plans=1x1/1x64x64 bf16, 1x1/1x64x128 bf16"});
  ASSERT_TRUE(server.ok()) << server.status();
  const auto wait_for_queue = [&](int depth) {
    const auto end = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (test::SumOnPage(test::HttpGet((*server)->metrics_address(), "/metrics"),
                           "rapt_queue_depth", {{"queue", "lanes"}}) != depth) {
      ASSERT_LT(std::chrono::steady_clock::now(), end) << "depth " << depth;
      std::this_thread::sleep_for(std::chrono::milliseconds(10));
    }
  };
  std::vector<std::future<absl::Status>> requests;
  const auto send = [&](int64_t size, uint64_t priority) {
    requests.push_back(
        std::async(std::launch::async, GetParam(), (*server)->grpc_address(), size, priority));
  };
  send(kLowSize, kLow);
  device.WaitUntilRunning();
  for (int n = 1; n < kLowRequests; ++n) send(kLowSize, kLow);
  wait_for_queue(kLowRequests - 1);
  send(kHighSize, kHigh);
  wait_for_queue(kLowRequests);
  device.Release();
  for (std::future<absl::Status>& request : requests) EXPECT_EQ(request.get(), absl::OkStatus());
  ASSERT_GE(device.sizes().size(), 3u);
  EXPECT_EQ(device.sizes()[0], kLowSize);
  EXPECT_EQ(device.sizes()[1], kHighSize);
  EXPECT_EQ(device.sizes()[2], kLowSize);
  (*server)->Drain();
}

INSTANTIATE_TEST_SUITE_P(, PriorityTest, ::testing::Values(Attend, Infer), [](const auto& info) {
  return std::string(info.param == Attend ? "Rapt" : "OpenInference");
});

// --- Masks without columns -----------------------------------------------------------------------

class EmptyMaskTest : public ::testing::TestWithParam<std::vector<const char*>> {};

// A mask that is shorter than the keys hides those beyond it. A row that sees no key is 0.
TEST_P(EmptyMaskTest, HidesEveryKeyOverBothProtocols) {
  test::DeviceControls().on_graph = [](const cudnn::SdpaGraph&, const cudnn::ArenaLayout&) {};
  const absl::StatusOr<std::unique_ptr<Server>> server = StartServer(GetParam());
  ASSERT_TRUE(server.ok()) << server.status();
  const std::vector<float> ones(4 * 8, 1);

  auto client = client::Client::Connect((*server)->grpc_address());
  ASSERT_TRUE(client.ok()) << client.status();
  const client::TensorView x = client::View<float>({1, 1, 4, 8}, ones);
  for (const client::DType dtype : {client::DType::kBool, client::DType::kFloat32}) {
    const absl::StatusOr<client::AttendResult> result =
        (*client)->Attend({.q = x, .k = x, .v = x, .mask = client::TensorView{dtype, {4, 0}, {}}});
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_THAT(result->y.values<float>(), ::testing::Each(0));
  }

  inference::ModelInferRequest request;
  request.set_model_name("attention");
  const auto add = [&request](const char* name, const char* type, std::vector<int64_t> shape,
                              const std::string& bytes) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype(type);
    input.mutable_shape()->Assign(shape.begin(), shape.end());
    request.add_raw_input_contents(bytes);
  };
  const std::string bytes(reinterpret_cast<const char*>(ones.data()), ones.size() * sizeof(float));
  for (const char* name : {"Q", "K", "V"}) add(name, "FP32", {1, 1, 4, 8}, bytes);
  add("attn_mask", "BOOL", {4, 0}, "");
  const auto stub = inference::GRPCInferenceService::NewStub(
      grpc::CreateChannel((*server)->grpc_address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  inference::ModelInferResponse response;
  const grpc::Status status = stub->ModelInfer(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.raw_output_contents(0), std::string(bytes.size(), '\0'));
  (*server)->Drain();
}

INSTANTIATE_TEST_SUITE_P(
    , EmptyMaskTest,
    ::testing::Values(std::vector<const char*>{"--backend=cpu"},
                      std::vector<const char*>{"--backend=cpu", "--isa=portable"},
                      std::vector<const char*>{"--backend=reference"},
                      std::vector<const char*>{"--backend=auto", "--cudnn_memory_bytes=67108864",
                                               "--cudnn_min_flops=0"}));

// --- Caches --------------------------------------------------------------------------------------

constexpr int64_t kHeadSize = 8;

// A server with memory for pages on its device, and a client of it.
class CacheOnDeviceTest : public ::testing::Test {
 protected:
  void Start(std::vector<const char*> flags) {
    flags.push_back("--kv_cache_bytes=67108864");
    test::DeviceControls().on_graph = [](const cudnn::SdpaGraph&, const cudnn::ArenaLayout&) {};
    auto server = StartServer(flags);
    ASSERT_TRUE(server.ok()) << server.status();
    server_ = *std::move(server);
    auto client = client::Client::Connect(server_->grpc_address());
    ASSERT_TRUE(client.ok()) << client.status();
    client_ = *std::move(client);
  }

  client::Cache Create() {
    return client::CreateCache(*client_, {.shapes = {{.kv_heads = 1, .head_size = kHeadSize}}})
        .value();
  }

  // Appends tokens whose values are all these numbers, and attends with one row. Keys are zeros, so
  // that y is the mean of all values.
  absl::StatusOr<client::CacheAttendResult> Step(client::Cache& cache,
                                                 const std::vector<float>& numbers) {
    const auto count = static_cast<int64_t>(numbers.size());
    std::vector<float> values;
    for (const float number : numbers) values.insert(values.end(), kHeadSize, number);
    const std::vector<float> zeros(values.size() + kHeadSize, 0);
    const auto view = [&](int64_t tokens, const std::vector<float>& data) {
      const auto size = static_cast<size_t>(tokens * kHeadSize);
      return client::View<float>({tokens, 1, kHeadSize}, absl::MakeConstSpan(data).first(size));
    };
    return cache.Attend({.q = view(1, zeros), .k = view(count, zeros), .v = view(count, values)});
  }

  void ExpectMean(const absl::StatusOr<client::CacheAttendResult>& step, float mean,
                  const std::string& backend) {
    ASSERT_TRUE(step.ok()) << step.status();
    EXPECT_THAT(step->y.values<float>(), ::testing::Each(::testing::FloatNear(mean, 1e-4f)));
    EXPECT_EQ(step->backend, backend);
  }

  double Metric(const char* name) const {
    return test::SumOnPage(test::HttpGet(server_->metrics_address(), "/metrics"), name, {});
  }

  ~CacheOnDeviceTest() override {
    client_.reset();
    if (server_ != nullptr) server_->Drain();
  }

  std::unique_ptr<Server> server_;
  std::unique_ptr<client::Client> client_;
};

TEST_F(CacheOnDeviceTest, ReadsCopiesOfPagesAcrossForksAndTruncations) {
  Start({"--backend=cudnn", "--cudnn_memory_bytes=67108864", "--cudnn_kv_cache_bytes=16777216"});
  EXPECT_EQ(Metric("rapt_device_page_memory_bytes"), 16777216);
  client::Cache cache = Create();
  ExpectMean(Step(cache, std::vector<float>(99, 1)), 1, "cudnn");
  const double before = Metric("rapt_device_page_copied_bytes_total");
  EXPECT_GT(before, 0);
  ExpectMean(Step(cache, {101}), 2, "cudnn");
  EXPECT_EQ(Metric("rapt_device_page_copied_bytes_total") - before, 2 * kHeadSize * sizeof(float))
      << "a key and a value";
  absl::StatusOr<client::Cache> fork = cache.Fork();
  ASSERT_TRUE(fork.ok()) << fork.status();
  ExpectMean(Step(*fork, std::vector<float>(100, 4)), 3, "cudnn");
  ExpectMean(Step(cache, std::vector<float>(100, 6)), 4, "cudnn");
  ASSERT_TRUE(cache.Truncate(99).ok());
  ExpectMean(Step(cache, {201}), 3, "cudnn");
  ExpectMean(Step(*fork, std::vector<float>(200, 5)), 4, "cudnn");
  EXPECT_GT(Metric("rapt_device_page_hits_total"), 0);
  EXPECT_GT(Metric("rapt_device_page_resident_bytes"), 0);
}

TEST_F(CacheOnDeviceTest, TheCpuAnswersWhenTheDeviceFails) {
  Start({"--backend=cudnn", "--cudnn_memory_bytes=67108864", "--cudnn_kv_cache_bytes=16777216"});
  client::Cache cache = Create();
  ExpectMean(Step(cache, std::vector<float>(70, 2)), 2, "cudnn");
  test::DeviceControls().failures = 1;
  ExpectMean(Step(cache, std::vector<float>(70, 4)), 3, "cudnn+cpu");
}

TEST_F(CacheOnDeviceTest, IsOffByDefault) {
  Start({"--backend=cudnn", "--cudnn_memory_bytes=67108864"});
  client::Cache cache = Create();
  ExpectMean(Step(cache, std::vector<float>(70, 2)), 2, "cpu");
}

}  // namespace
}  // namespace rapt
