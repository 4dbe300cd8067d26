// The built server under overload: it stays within its memory budget, and every call gets the
// correct result or one clear error.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <functional>
#include <future>
#include <limits>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "tests/support/memory_watch.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_call.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using grpc::StatusCode;
using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;
using inference::ModelStreamInferResponse;

constexpr char kInferPath[] = "/inference.GRPCInferenceService/ModelInfer";
constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kBudget = 256 * kMiB;

constexpr int64_t kNoLimit = std::numeric_limits<int64_t>::max();

std::string Floats(int64_t count, float value) {
  std::vector<float> values(count, value);
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

void AddInput(ModelInferRequest& request, const std::string& name,
              const std::vector<int64_t>& shape, std::string bytes) {
  auto& input = *request.add_inputs();
  input.set_name(name);
  input.set_datatype("FP32");
  input.mutable_shape()->Assign(shape.begin(), shape.end());
  request.add_raw_input_contents(std::move(bytes));
}

// One head; values of 0.5 everywhere, so that Y is 0.5 too.
ModelInferRequest Call(int64_t queries, int64_t keys, int64_t size) {
  ModelInferRequest request;
  request.set_model_name("attention");
  AddInput(request, "Q", {1, 1, queries, size}, Floats(queries * size, 1));
  AddInput(request, "K", {1, 1, keys, size}, Floats(keys * size, 1));
  AddInput(request, "V", {1, 1, keys, size}, Floats(keys * size, 0.5f));
  return request;
}

// 24 MiB of keys and values; the only query sees a few of them.
ModelInferRequest LargeCall() {
  ModelInferRequest request = Call(1, 48 * 1024, 64);
  (*request.mutable_parameters())["left_window_size"].set_int64_param(8);
  (*request.mutable_parameters())["right_window_size"].set_int64_param(8);
  return request;
}

// Requests the weights, 4 * queries^2 bytes.
ModelInferRequest WeightsCall(int64_t queries) {
  ModelInferRequest request = Call(queries, queries, 1);
  request.add_outputs()->set_name("Y");
  request.add_outputs()->set_name("qk_matmul_output");
  (*request.mutable_parameters())["qk_matmul_output_mode"].set_int64_param(3);
  return request;
}

bool IsHalfEverywhere(const std::string& bytes) {
  std::vector<float> values(bytes.size() / sizeof(float));
  std::memcpy(values.data(), bytes.data(), bytes.size());
  return !values.empty() && std::all_of(values.begin(), values.end(),
                                        [](float v) { return std::abs(v - .5f) < 1e-5; });
}

std::shared_ptr<grpc::Channel> Connect(const ServerProcess& server) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);  // a separate connection
  // gRPC 1.51 reads errno of connect() after other calls that may set it, and then takes a
  // connection in progress for a failed one (grpc/grpc#35064). Calls wait for the next attempt.
  arguments.SetServiceConfigJSON(R"({"methodConfig": [{"name": [{}], "waitForReady": true}]})");
  return grpc::CreateCustomChannel(server.grpc_address(), grpc::InsecureChannelCredentials(),
                                   arguments);
}

// Results of the calls of a mix.
struct Tally {
  std::atomic<int> right{0};
  std::atomic<int> refused{0};

  // Expects a correct result or RESOURCE_EXHAUSTED.
  void Note(const grpc::Status& status, const ModelInferResponse& response) {
    if (status.ok()) {
      EXPECT_TRUE(IsHalfEverywhere(response.raw_output_contents(0)));
      ++right;
    } else {
      EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
      ++refused;
    }
  }
};

// Runs `run` concurrently on `count` threads and joins them.
void OnThreads(int count, const std::function<void()>& run) {
  std::vector<std::thread> threads(count);
  for (std::thread& thread : threads) thread = std::thread(run);
  for (std::thread& thread : threads) thread.join();
}

// Callers with separate connections, each repeating the request.
void RunCallers(const ServerProcess& server, const ModelInferRequest& request, int callers,
                int calls_each, Tally& tally) {
  OnThreads(callers, [&] {
    const auto stub = GRPCInferenceService::NewStub(Connect(server));
    for (int call = 0; call < calls_each; ++call) {
      grpc::ClientContext context;
      ModelInferResponse response;
      const grpc::Status status = stub->ModelInfer(&context, request, &response);
      tally.Note(status, response);
    }
  });
}

TEST(PressureTest, MemoryStaysWithinTheBudgetUnderEveryMix) {
  const ServerProcess server({absl::StrCat("--memory_budget_bytes=", kBudget), "--threads=2",
                              "--min_receive_bytes_per_second=67108864"});
  const ModelInferRequest large = LargeCall();
  const ModelInferRequest beyond = WeightsCall(22'000);  // 1.9 GB of weights
  const ModelInferRequest weights = WeightsCall(3'000);  // 36 MB
  const ModelInferRequest tiny = Call(1, 4, 4);
  constexpr int kTinyCallers = 200, kLargeCallers = 24, kWeightsCallers = 8, kSlowCallers = 8;
  Tally large_tally, beyond_tally, weights_tally, tiny_tally;
  int64_t peak;
  {
    const MemoryWatch watch(server.pid());
    std::vector<std::thread> mixes;
    mixes.emplace_back([&] { RunCallers(server, large, kLargeCallers, 3, large_tally); });
    mixes.emplace_back([&] { RunCallers(server, beyond, kWeightsCallers, 5, beyond_tally); });
    mixes.emplace_back([&] { RunCallers(server, weights, kWeightsCallers, 2, weights_tally); });
    mixes.emplace_back([&] { RunCallers(server, tiny, kTinyCallers, 5, tiny_tally); });
    for (int n = 0; n < kSlowCallers; ++n) {
      mixes.emplace_back([&] {
        RawCall slow(server.grpc_address(), kInferPath);
        slow.SendPart(24 * kMiB, 60'000);
        EXPECT_EQ(slow.WaitForStatus(), StatusCode::RESOURCE_EXHAUSTED);
      });
    }
    for (std::thread& mix : mixes) mix.join();
    peak = watch.peak();
  }
  EXPECT_LE(peak, kRssIsMeaningful ? kBudget * 5 / 4 + 64 * kMiB : kNoLimit);
  EXPECT_GT(peak, 32 * kMiB) << "nothing was measured";
  EXPECT_EQ(beyond_tally.right, 0);
  EXPECT_GT(large_tally.right, 0);
  EXPECT_GT(weights_tally.right, 0);
  EXPECT_GT(tiny_tally.right, kTinyCallers) << "small requests have a reserved part";
  WaitUntilNothingIsHeld(server);
  std::printf("peak RssAnon %ld MiB; right answers: large %d, weights %d, tiny %d\n",
              static_cast<long>(peak / kMiB), large_tally.right.load(), weights_tally.right.load(),
              tiny_tally.right.load());

  // Memory is returned after the burst.
  const auto patience = std::chrono::steady_clock::now() + std::chrono::seconds(60);
  while (kRssIsMeaningful && RssAnonBytes(server.pid()) > 64 * kMiB) {
    ASSERT_LT(std::chrono::steady_clock::now(), patience)
        << RssAnonBytes(server.pid()) / kMiB << " MiB are still held";
    std::this_thread::sleep_for(std::chrono::milliseconds(10));
  }
}

// --- Streams of requests -------------------------------------------------------------------------

constexpr char kStreamPath[] = "/inference.GRPCInferenceService/ModelStreamInfer";

// A ModelStreamInfer that is open until its destruction.
class Stream {
 public:
  explicit Stream(GRPCInferenceService::Stub& stub) : stream_(stub.ModelStreamInfer(&context_)) {}
  ~Stream() {
    if (is_finished_) return;
    context_.TryCancel();
    stream_->Finish();
  }

  void Send(const ModelInferRequest& request) { EXPECT_TRUE(stream_->Write(request)); }
  ModelStreamInferResponse Receive() {
    ModelStreamInferResponse response;
    EXPECT_TRUE(stream_->Read(&response)) << "the stream ended";
    return response;
  }
  ModelStreamInferResponse Infer(const ModelInferRequest& request) {
    Send(request);
    return Receive();
  }
  // Waits until the server ends the stream.
  StatusCode WaitForStatus() {
    ModelStreamInferResponse response;
    EXPECT_FALSE(stream_->Read(&response));
    is_finished_ = true;
    return stream_->Finish().error_code();
  }

 private:
  grpc::ClientContext context_;
  bool is_finished_ = false;
  std::unique_ptr<grpc::ClientReaderWriter<ModelInferRequest, ModelStreamInferResponse>> stream_;
};

void ExpectRight(const ModelStreamInferResponse& response) {
  EXPECT_EQ(response.error_message(), "");
  ASSERT_EQ(response.infer_response().raw_output_contents_size(), 1);
  EXPECT_TRUE(IsHalfEverywhere(response.infer_response().raw_output_contents(0)));
}

grpc::Status InferOnce(GRPCInferenceService::Stub& stub, const ModelInferRequest& request) {
  grpc::ClientContext context;
  ModelInferResponse response;
  return stub.ModelInfer(&context, request, &response);
}

TEST(StreamPressureTest, SilentStreamsHoldNothingAndDelayNobody) {
  constexpr int kStreams = 200;
  const ServerProcess server({absl::StrCat("--memory_budget_bytes=", kBudget)});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  std::vector<std::unique_ptr<Stream>> streams;
  for (int n = 0; n < kStreams; ++n) streams.push_back(std::make_unique<Stream>(*stub));
  WaitForMetric(server, "rapt_open_streams", kStreams);
  EXPECT_EQ(ReadMetric(server, "rapt_memory_reserved_bytes"), 0);
  WaitForMetric(server, "rapt_open_calls", 0);  // no request is in flight
  EXPECT_TRUE(InferOnce(*stub, LargeCall()).ok());
  ExpectRight(streams.back()->Infer(LargeCall()));
  streams.clear();
  WaitUntilNothingIsHeld(server);
}

TEST(StreamPressureTest, StreamsCountTowardsTheirCallersLimit) {
  for (const char* flag : {"--max_open_calls=2", "--max_calls_per_caller=2"}) {
    const ServerProcess server({flag});
    const auto stub = GRPCInferenceService::NewStub(Connect(server));
    {
      Stream first(*stub), second(*stub);
      WaitForMetric(server, "rapt_open_streams", 2);
      EXPECT_EQ(InferOnce(*stub, Call(1, 4, 4)).error_code(), StatusCode::RESOURCE_EXHAUSTED);
      Stream third(*stub);
      EXPECT_EQ(third.WaitForStatus(), StatusCode::RESOURCE_EXHAUSTED) << flag;
      ExpectRight(second.Infer(Call(1, 4, 4)));
    }
    WaitUntilNothingIsHeld(server);
  }
}

// Even beyond its share: rejecting a message that has arrived would not free memory sooner.
TEST(StreamPressureTest, AnUnannouncedMessageDoesNotWaitForMemory) {
  const ServerProcess server(
      {"--memory_budget_bytes=16777216", "--min_receive_bytes_per_second=1"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  {
    const RawCall first(server.grpc_address(), kInferPath);  // each holds half of the share
    const RawCall second(server.grpc_address(), kInferPath);
    WaitForMetric(server, "rapt_open_calls", 2);
    Stream stream(*stub);
    ModelInferRequest request = Call(1, 4 * 1024, 64);  // 2 MiB
    ExpectRight(stream.Infer(request));
    WaitForMetric(server, "rapt_open_calls", 2);  // the unsent calls still hold the share
  }
  WaitUntilNothingIsHeld(server);
}

TEST(StreamPressureTest, MemoryStaysWithinTheBudgetUnderManyStreams) {
  constexpr int kStreams = 16, kCallsEach = 4, kTinyCallers = 50;
  const ServerProcess server({absl::StrCat("--memory_budget_bytes=", kBudget), "--threads=2"});
  ModelInferRequest request = Call(1, 16 * 1024, 64);  // 8 MiB
  const ModelInferRequest tiny = Call(1, 4, 4);
  Tally tiny_tally;
  int64_t peak;
  {
    const MemoryWatch watch(server.pid());
    std::thread tiny_callers([&] { RunCallers(server, tiny, kTinyCallers, 5, tiny_tally); });
    OnThreads(kStreams, [&] {
      const auto stub = GRPCInferenceService::NewStub(Connect(server));
      Stream stream(*stub);
      for (int call = 0; call < kCallsEach; ++call) ExpectRight(stream.Infer(request));
    });
    tiny_callers.join();
    peak = watch.peak();
  }
  std::printf("peak RssAnon %ld MiB; right tiny answers %d\n", static_cast<long>(peak / kMiB),
              tiny_tally.right.load());
  EXPECT_LE(peak, kRssIsMeaningful ? kBudget + 128 * kMiB + (kStreams + kTinyCallers) * 68 * 1024
                                   : kNoLimit);
  EXPECT_GT(peak, 8 * kMiB) << "nothing was measured";
  EXPECT_GT(tiny_tally.right, 0);
  WaitUntilNothingIsHeld(server);
}

TEST(BrokenStreamTest, ACallerKilledWhileItSendsHoldsNothing) {
  const ServerProcess server;
  {
    RawCall call(server.grpc_address(), kStreamPath);
    call.SendPart(10'000'000, 60'000);
    WaitForMetric(server, "rapt_memory_reserved_bytes", 10'000'000, {{"kind", "receive"}});
  }
  WaitUntilNothingIsHeld(server);
}

TEST(BrokenStreamTest, ACallerKilledWhileTheServerComputesHoldsNothing) {
  const ServerProcess server({"--threads=1"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  {
    Stream stream(*stub);
    stream.Send(Call(100'000, 100'000, 16));  // minutes of work
    WaitUntilComputing(server);
  }
  WaitUntilNothingIsHeld(server);
}

TEST(BrokenStreamTest, AStreamWhoseCallerDoesNotReadIsEvicted) {
  const ServerProcess server({"--default_deadline=2s"});
  RawCall call(server.grpc_address(), kStreamPath);
  call.SendMessage(WeightsCall(1000).SerializeAsString());  // 4 MB of weights come back
  WaitForMetric(server, "rapt_deadline_exceeded_total", 1, {{"phase", "send"}});
  WaitUntilNothingIsHeld(server);
}

TEST(StreamShutdownTest, ASilentStreamDoesNotDelayShutdown) {
  ServerProcess server({"--grace_period=1h"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  Stream stream(*stub);
  ExpectRight(stream.Infer(Call(1, 4, 4)));
  server.Terminate();
  EXPECT_EQ(server.Wait(), 0);
}

TEST(StreamShutdownTest, FinishesARequestInFlightAndRejectsNewStreams) {
  ServerProcess server({kDrainPause, kDrainRefusalTime, "--threads=1", "--grace_period=1h",
                        "--default_deadline=1h"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  Stream stream(*stub);
  stream.Send(Call(30'000, 30'000, 16));
  WaitUntilComputing(server);
  server.Terminate();
  StatusCode refused = StatusCode::OK;
  while (refused == StatusCode::OK) {  // calls are still accepted during --drain_pause
    refused = InferOnce(*stub, Call(1, 4, 4)).error_code();
  }
  EXPECT_EQ(refused, StatusCode::UNAVAILABLE);
  Stream late(*stub);
  EXPECT_EQ(late.WaitForStatus(), StatusCode::UNAVAILABLE);
  ExpectRight(stream.Receive());
  EXPECT_EQ(server.Wait(), 0);
}

// --- Hostile messages -----------------------------------------------------------------

struct Hostile {
  const char* name;
  std::function<void(ModelInferRequest&)> spoil;
};

const Hostile kHostile[] = {
    {"ProductOverflows",
     [](auto& r) {
       for (int n = 0; n < 3; ++n) {
         for (int axis = 0; axis < 4; ++axis)
           r.mutable_inputs(n)->set_shape(axis, int64_t{1} << 40);
       }
     }},
    {"ProductWrapsToTheRightSize",
     [](auto& r) {
       auto& shape = *r.mutable_inputs(0)->mutable_shape();
       shape.Set(0, int64_t{1} << 62);
       shape.Set(1, 4);
     }},
    {"LargestAxis",
     [](auto& r) { r.mutable_inputs(1)->set_shape(2, std::numeric_limits<int64_t>::max()); }},
    {"NegativeAxis", [](auto& r) { r.mutable_inputs(1)->set_shape(2, -1); }},
    {"HugeRank",
     [](auto& r) {
       for (int n = 0; n < 10'000; ++n) r.mutable_inputs(0)->add_shape(1);
     }},
    {"ManyInputs",
     [](auto& r) {
       for (int n = 0; n < 10'000; ++n) r.add_inputs();
     }},
    {"ManyTensors",
     [](auto& r) {
       for (int n = 0; n < 1'000'000; ++n) r.add_raw_input_contents();
     }},
    {"ManyKeyLengths",
     [](auto& r) {
       AddInput(r, "nonpad_kv_seqlen", {1'000'000}, std::string(8'000'000, '\0'));
       r.mutable_inputs(3)->set_datatype("INT64");
     }},
};

class HostileTest : public ::testing::TestWithParam<Hostile> {};

TEST_P(HostileTest, IsRejectedWithAClearError) {
  const ServerProcess server({absl::StrCat("--memory_budget_bytes=", kBudget), "--threads=1"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  ModelInferRequest request = Call(1, 4, 4);
  GetParam().spoil(request);
  int64_t peak;
  {
    const MemoryWatch watch(server.pid());
    for (int n = 0; n < 3; ++n) {
      grpc::ClientContext context;
      ModelInferResponse response;
      const grpc::Status status = stub->ModelInfer(&context, request, &response);
      EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
      EXPECT_FALSE(status.error_message().empty());
    }
    peak = watch.peak();
  }
  EXPECT_LE(peak, kRssIsMeaningful ? 128 * kMiB : kNoLimit);
  grpc::ClientContext context;
  ModelInferResponse response;
  EXPECT_TRUE(stub->ModelInfer(&context, Call(1, 4, 4), &response).ok())
      << "the server must keep serving";
  WaitUntilNothingIsHeld(server);
}

INSTANTIATE_TEST_SUITE_P(All, HostileTest, ::testing::ValuesIn(kHostile),
                         [](const auto& info) { return std::string(info.param.name); });

// Makes one call with a serialized message on a separate connection. Returns its status.
grpc::Status CallRaw(const ServerProcess& server, const std::string& message) {
  const grpc::Slice slice(message.data(), message.size(), grpc::Slice::STATIC_SLICE);
  const grpc::ByteBuffer bytes(&slice, 1);
  grpc::GenericStub stub(Connect(server));
  grpc::ClientContext context;
  grpc::ByteBuffer response;
  std::promise<grpc::Status> promise;
  stub.UnaryCall(&context, kInferPath, grpc::StubOptions(), &bytes, &response,
                 [&](grpc::Status s) { promise.set_value(std::move(s)); });
  return promise.get_future().get();
}

// Ten million empty inputs: 20 MB that generated code would expand to gigabytes.
TEST(HostileMessageTest, ManyEmptyStructuresAreRejectedBeforeAllocation) {
  const ServerProcess server({absl::StrCat("--memory_budget_bytes=", kBudget), "--threads=1"});
  std::string message;
  for (int n = 0; n < 10'000'000; ++n) message.append("\x2A\x00", 2);
  int64_t peak;
  {
    const MemoryWatch watch(server.pid());
    const grpc::Status status = CallRaw(server, message);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
    peak = watch.peak();
  }
  EXPECT_LE(peak, kRssIsMeaningful ? 128 * kMiB : kNoLimit);
  WaitUntilNothingIsHeld(server);
}

// --- Broken calls --------------------------------------------------------------------------------

TEST(BrokenCallTest, ATruncatedMessageIsRejectedAndReleased) {
  const ServerProcess server;
  RawCall call(server.grpc_address(), kInferPath);
  call.SendPart(1'000'000, 30'000);
  call.HalfClose();
  EXPECT_NE(call.WaitForStatus(), StatusCode::OK);
  WaitUntilNothingIsHeld(server);
}

TEST(BrokenCallTest, ACallWithoutAMessageIsRejected) {
  const ServerProcess server;
  RawCall call(server.grpc_address(), kInferPath);
  call.HalfClose();
  EXPECT_EQ(call.WaitForStatus(), StatusCode::INVALID_ARGUMENT);
  WaitUntilNothingIsHeld(server);
}

TEST(BrokenCallTest, ACallerKilledWhileItSendsHoldsNothing) {
  const ServerProcess server;
  {
    RawCall call(server.grpc_address(), kInferPath);
    call.SendPart(10'000'000, 60'000);
    WaitForMetric(server, "rapt_open_calls", 1);
  }
  WaitUntilNothingIsHeld(server);
}

TEST(BrokenCallTest, ACallerKilledWhileTheServerComputesHoldsNothing) {
  const ServerProcess server({"--threads=1"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  grpc::ClientContext context;
  ModelInferResponse response;
  std::thread caller([&] {  // minutes of work
    EXPECT_EQ(stub->ModelInfer(&context, Call(100'000, 100'000, 16), &response).error_code(),
              StatusCode::CANCELLED);
  });
  WaitUntilComputing(server);
  context.TryCancel();
  caller.join();
  WaitUntilNothingIsHeld(server);
}

TEST(BrokenCallTest, ASlowSenderIsEvicted) {
  const ServerProcess server({"--min_receive_bytes_per_second=2000000000"});
  RawCall call(server.grpc_address(), kInferPath);
  call.SendPart(1'000'000, 30'000);
  EXPECT_EQ(call.WaitForStatus(), StatusCode::RESOURCE_EXHAUSTED);
  WaitUntilNothingIsHeld(server);
}

TEST(BrokenCallTest, TheDefaultDeadlineEndsACallThatNeverSends) {
  const ServerProcess server({"--default_deadline=100ms"});
  RawCall call(server.grpc_address(), kInferPath);
  EXPECT_EQ(call.WaitForStatus(), StatusCode::DEADLINE_EXCEEDED);
  WaitUntilNothingIsHeld(server);
}

// --- Headers and limits --------------------------------------------------------------------------

TEST(LimitsTest, OpenCallsAreBounded) {
  for (const char* flag : {"--max_open_calls=2", "--max_calls_per_caller=2"}) {
    const ServerProcess server({flag});
    {
      const RawCall first(server.grpc_address(), kInferPath);
      const RawCall second(server.grpc_address(), kInferPath);
      WaitForMetric(server, "rapt_open_calls", 2);
      RawCall third(server.grpc_address(), kInferPath);
      EXPECT_EQ(third.WaitForStatus(), StatusCode::RESOURCE_EXHAUSTED) << flag;
    }
    WaitUntilNothingIsHeld(server);
  }
}

TEST(LimitsTest, AMessageLimitBeyondTheBudgetsShareIsAStartupError) {
  ChildProcess server(
      ServerCommand({"--grpc_address=127.0.0.1:0", "--metrics_address=127.0.0.1:0",
                     "--memory_budget_bytes=1000000", "--max_message_bytes=500000"}));
  EXPECT_EQ(server.Wait(), 2);
  EXPECT_THAT(server.Errors(), ::testing::HasSubstr("--max_message_bytes is 500000"));
}

TEST(LimitsTest, ResponsesReportTheirTimes) {
  const ServerProcess server;
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  grpc::ClientContext context;
  ModelInferResponse response;
  ASSERT_TRUE(stub->ModelInfer(&context, Call(1, 4, 4), &response).ok());
  for (const char* name : {"rapt-queue-us", "rapt-compute-us"}) {
    EXPECT_EQ(context.GetServerTrailingMetadata().count(name), 1u) << name;
  }
}

}  // namespace
}  // namespace rapt::test
