// The real rapt-server, started as a child process and called as any client would call it.
#include <gmock/gmock.h>
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <csignal>
#include <cstring>
#include <functional>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "proto/grpc/health/v1/health.grpc.pb.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "tests/support/loopback.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_http2.h"
#include "tests/support/server_process.h"

namespace rapt {
namespace {

using grpc::StatusCode;
using grpc::health::v1::HealthCheckRequest;
using grpc::health::v1::HealthCheckResponse;
using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;
using test::ChildProcess;
using test::Exchange;
using test::HttpGet;
using test::kDrainPause;
using test::kDrainRefusalTime;
using test::ReadMetric;
using test::ServerCommand;
using test::ServerProcess;
using test::WaitForMetric;
using ::testing::FloatNear;
using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::Pointwise;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

constexpr char kServiceName[] = "inference.GRPCInferenceService";

std::shared_ptr<grpc::Channel> Connect(const ServerProcess& server) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  return grpc::CreateCustomChannel(server.grpc_address(), grpc::InsecureChannelCredentials(),
                                   arguments);
}

// Self-attention over `x` of shape [1, heads, length, size].
ModelInferRequest SelfAttention(const std::vector<float>& x, int64_t heads, int64_t length,
                                int64_t size) {
  ModelInferRequest request;
  request.set_model_name("attention");
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {int64_t{1}, heads, length, size}) input.add_shape(axis);
    request.add_raw_input_contents(x.data(), x.size() * sizeof(float));
  }
  return request;
}

ModelInferRequest HandComputed() {
  return SelfAttention({1, 0, 1, 0, 0, 1, 0, 1, 1, 1, 0, 0}, 1, 3, 4);
}

// Takes the reference backend about a second on one thread, in many tasks; with kEndless, far
// longer than any test.
constexpr int64_t kLong = 1024;
constexpr int64_t kEndless = 16384;

ModelInferRequest LongRequest(int64_t length) {
  constexpr int64_t kHeads = 2, kSize = 64;
  return SelfAttention(std::vector<float>(kHeads * length * kSize, 0.5f), kHeads, length, kSize);
}

std::vector<float> Floats(const std::string& raw) {
  std::vector<float> values(raw.size() / sizeof(float));
  std::memcpy(values.data(), raw.data(), raw.size());
  return values;
}

void WaitForCount(const ServerProcess& server, const char* method, const char* code, int count) {
  WaitForMetric(server, "rapt_requests_total", count,
                {{"code", code}, {"method", absl::StrCat(kServiceName, "/", method)}});
}

// --- Tests that leave the server unchanged share one ---------------------------------------------

class ServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new ServerProcess({"--memory_budget_bytes=67108864"}); }
  static void TearDownTestSuite() { delete server_; }

  std::unique_ptr<GRPCInferenceService::Stub> stub_ =
      GRPCInferenceService::NewStub(Connect(*server_));
  grpc::ClientContext context_;

  static ServerProcess* server_;
};

ServerProcess* ServerTest::server_ = nullptr;

TEST_F(ServerTest, ComputesTheHandComputedExample) {
  ModelInferRequest request = HandComputed();
  request.set_id("example");
  request.add_outputs()->set_name("Y");
  request.add_outputs()->set_name("qk_matmul_output");
  (*request.mutable_parameters())["qk_matmul_output_mode"].set_int64_param(3);
  ModelInferResponse response;
  const grpc::Status status = stub_->ModelInfer(&context_, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.id(), "example");
  ASSERT_EQ(response.raw_output_contents_size(), 2);
  const std::vector<float> y = {.8137f, .4935f, .5065f, .1863f, .4935f, .8137f,
                                .1863f, .5065f, .7259f, .7259f, .2741f, .2741f};
  const std::vector<float> weights = {.5065f, .1863f, .3072f, .1863f, .5065f,
                                      .3072f, .2741f, .2741f, .4519f};
  EXPECT_THAT(Floats(response.raw_output_contents(0)), Pointwise(FloatNear(5e-5f), y));
  EXPECT_THAT(Floats(response.raw_output_contents(1)), Pointwise(FloatNear(5e-5f), weights));
}

TEST_F(ServerTest, NamesBackendAndPlanInTheTrailers) {
  ModelInferResponse response;
  ASSERT_TRUE(stub_->ModelInfer(&context_, HandComputed(), &response).ok());
  std::map<std::string, std::string> trailers;
  for (const auto& [key, value] : context_.GetServerTrailingMetadata()) {
    trailers[std::string(key.data(), key.size())] = std::string(value.data(), value.size());
  }
  EXPECT_EQ(trailers["rapt-backend"], "cpu");
  EXPECT_THAT(trailers["rapt-plan"], StartsWith("cpu/"));
}

TEST_F(ServerTest, IsLiveAndReady) {
  inference::ServerLiveResponse live;
  ASSERT_TRUE(stub_->ServerLive(&context_, {}, &live).ok());
  EXPECT_TRUE(live.live());
  grpc::ClientContext context;
  inference::ServerReadyResponse ready;
  ASSERT_TRUE(stub_->ServerReady(&context, {}, &ready).ok());
  EXPECT_TRUE(ready.ready());
}

TEST_F(ServerTest, OnlyItsOwnModelIsReady) {
  const std::pair<const char*, bool> cases[] = {{"attention", true}, {"gpt", false}};
  for (const auto& [name, ready] : cases) {
    grpc::ClientContext context;
    inference::ModelReadyRequest request;
    request.set_name(name);
    inference::ModelReadyResponse response;
    ASSERT_TRUE(stub_->ModelReady(&context, request, &response).ok());
    EXPECT_EQ(response.ready(), ready) << name;
  }
}

TEST_F(ServerTest, AnnouncesTheExtensionsThatWork) {
  inference::ServerMetadataResponse metadata;
  ASSERT_TRUE(stub_->ServerMetadata(&context_, {}, &metadata).ok());
  EXPECT_EQ(metadata.name(), "rapt");
  EXPECT_FALSE(metadata.version().empty());
  EXPECT_THAT(metadata.extensions(),
              UnorderedElementsAre("statistics", "parameters", "model_configuration",
                                   "binary_tensor_data"));
}

TEST_F(ServerTest, TheModelsConfigurationAgreesWithItsMetadata) {
  inference::ModelMetadataRequest metadata_request;
  metadata_request.set_name("attention");
  inference::ModelMetadataResponse metadata;
  ASSERT_TRUE(stub_->ModelMetadata(&context_, metadata_request, &metadata).ok());
  grpc::ClientContext context;
  inference::ModelConfigRequest config_request;
  config_request.set_name("attention");
  inference::ModelConfigResponse config;
  ASSERT_TRUE(stub_->ModelConfig(&context, config_request, &config).ok());

  ASSERT_TRUE(config.has_config());
  EXPECT_EQ(config.config().max_batch_size(), 0);
  ASSERT_EQ(metadata.inputs_size(), 9);
  ASSERT_EQ(config.config().input_size(), metadata.inputs_size());
  for (int i = 0; i < metadata.inputs_size(); ++i) {
    EXPECT_EQ(config.config().input(i).name(), metadata.inputs(i).name());
    EXPECT_EQ(config.config().input(i).dims_size(), metadata.inputs(i).shape_size());
    EXPECT_EQ(DataType_Name(config.config().input(i).data_type()),
              "TYPE_" + metadata.inputs(i).datatype());
  }
  ASSERT_EQ(metadata.outputs_size(), 5);
  ASSERT_EQ(config.config().output_size(), metadata.outputs_size());
  for (int i = 0; i < metadata.outputs_size(); ++i) {
    EXPECT_EQ(config.config().output(i).name(), metadata.outputs(i).name());
  }
}

TEST_F(ServerTest, AnotherModelIsNotFound) {
  inference::ModelMetadataRequest metadata_request;
  metadata_request.set_name("gpt");
  inference::ModelMetadataResponse metadata;
  EXPECT_EQ(stub_->ModelMetadata(&context_, metadata_request, &metadata).error_code(),
            StatusCode::NOT_FOUND);
  grpc::ClientContext config_context;
  inference::ModelConfigRequest config_request;
  config_request.set_name("attention");
  config_request.set_version("2");
  inference::ModelConfigResponse config;
  EXPECT_EQ(stub_->ModelConfig(&config_context, config_request, &config).error_code(),
            StatusCode::NOT_FOUND);
}

struct Refusal {
  const char* name;
  std::function<void(ModelInferRequest&)> spoil;
  StatusCode code;
  std::vector<const char*> fragments;
};

// One of each kind; the codec's own test has them all.
const Refusal kRefusals[] = {
    {"Model", [](auto& r) { r.set_model_name("gpt"); }, StatusCode::NOT_FOUND, {"gpt"}},
    {"Input",
     [](auto& r) { r.mutable_inputs(1)->set_name("W"); },
     StatusCode::INVALID_ARGUMENT,
     {"W"}},
    {"Bytes",
     [](auto& r) { r.mutable_raw_input_contents(1)->resize(47); },
     StatusCode::INVALID_ARGUMENT,
     {"K", "47", "48"}},
    {"Parameter",
     [](auto& r) { (*r.mutable_parameters())["is_casual"].set_bool_param(true); },
     StatusCode::INVALID_ARGUMENT,
     {"is_casual"}},
    {"SharedMemory",
     [](auto& r) {
       (*r.mutable_inputs(0)->mutable_parameters())["shared_memory_region"].set_string_param("r");
       (*r.mutable_inputs(0)->mutable_parameters())["shared_memory_byte_size"].set_int64_param(48);
     },
     StatusCode::UNIMPLEMENTED,
     {"shared memory"}},
    {"KeyLengths",
     [](auto& r) {
       auto& input = *r.add_inputs();
       input.set_name("nonpad_kv_seqlen");
       input.set_datatype("INT64");
       input.add_shape(1);
       const int64_t length = 4;
       r.add_raw_input_contents(&length, sizeof(length));
     },
     StatusCode::INVALID_ARGUMENT,
     {"nonpad_kv_seqlen[0]", "4", "3"}},
    {"Budget",  // 256 KiB of Q, K and V request 1 GiB of scores
     [](auto& r) {
       r = SelfAttention(std::vector<float>(1 << 14, 1.0f), 1, 1 << 14, 1);
       r.add_outputs()->set_name("qk_matmul_output");
     },
     StatusCode::RESOURCE_EXHAUSTED,
     {"needs 107", "67108864"}},
    {"Timeout",
     [](auto& r) {
       r = LongRequest(kLong);
       (*r.mutable_parameters())["timeout"].set_int64_param(1);
     },
     StatusCode::DEADLINE_EXCEEDED,
     {"deadline"}},
};

class ServerRefusalTest : public ServerTest, public ::testing::WithParamInterface<Refusal> {};

TEST_P(ServerRefusalTest, GivesTheCodeAndNamesWhatIsWrong) {
  ModelInferRequest request = HandComputed();
  GetParam().spoil(request);
  ModelInferResponse response;
  const grpc::Status status = stub_->ModelInfer(&context_, request, &response);
  EXPECT_EQ(status.error_code(), GetParam().code) << status.error_message();
  for (const char* fragment : GetParam().fragments) {
    EXPECT_THAT(status.error_message(), HasSubstr(fragment));
  }
}

INSTANTIATE_TEST_SUITE_P(All, ServerRefusalTest, ::testing::ValuesIn(kRefusals),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(ServerTest, TruncatesALongErrorMessage) {
  ModelInferRequest request = HandComputed();
  request.mutable_inputs(0)->set_name(std::string(60000, 'q'));
  ModelInferResponse response;
  const grpc::Status status = stub_->ModelInfer(&context_, request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("qqq..."));
}

TEST_F(ServerTest, TruncatesAnErrorMessageBetweenCharacters) {
  for (const char* before : {"", "q"}) {
    ModelInferRequest request = HandComputed();
    std::string name = before;
    for (int n = 0; n < 2000; ++n) name += "é";
    request.mutable_inputs(0)->set_name(name);
    grpc::ClientContext context;
    ModelInferResponse response;
    const grpc::Status status = stub_->ModelInfer(&context, request, &response);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << status.error_message();
    EXPECT_THAT(status.error_message(), HasSubstr("éé..."));
  }
}

template <typename Request, typename Response>
grpc::Status Call(GRPCInferenceService::Stub& stub,
                  grpc::Status (GRPCInferenceService::Stub::*method)(grpc::ClientContext*,
                                                                     const Request&, Response*)) {
  grpc::ClientContext context;
  Response response;
  return (stub.*method)(&context, Request(), &response);
}

TEST_F(ServerTest, OtherMethodsAreUnimplemented) {
  using Stub = GRPCInferenceService::Stub;
  // The text that the message must contain.
  const std::pair<const char*, grpc::Status> answers[] = {
      {"RepositoryModelLoad", Call(*stub_, &Stub::RepositoryModelLoad)},
      {"RepositoryModelUnload", Call(*stub_, &Stub::RepositoryModelUnload)},
      {"shared memory", Call(*stub_, &Stub::SystemSharedMemoryStatus)},
      {"shared memory", Call(*stub_, &Stub::SystemSharedMemoryRegister)},
      {"shared memory", Call(*stub_, &Stub::SystemSharedMemoryUnregister)},
      {"shared memory", Call(*stub_, &Stub::CudaSharedMemoryStatus)},
      {"shared memory", Call(*stub_, &Stub::CudaSharedMemoryRegister)},
      {"shared memory", Call(*stub_, &Stub::CudaSharedMemoryUnregister)},
  };
  for (const auto& [topic, status] : answers) {
    EXPECT_EQ(status.error_code(), StatusCode::UNIMPLEMENTED) << topic;
    EXPECT_THAT(status.error_message(), HasSubstr(topic));
  }
}

TEST_F(ServerTest, RejectsCompressedMessages) {
  context_.set_compression_algorithm(GRPC_COMPRESS_GZIP);
  ModelInferResponse response;
  EXPECT_EQ(stub_->ModelInfer(&context_, HandComputed(), &response).error_code(),
            StatusCode::UNIMPLEMENTED);
}

TEST_F(ServerTest, HealthKnowsTheServerAndItsServices) {
  const auto health = grpc::health::v1::Health::NewStub(Connect(*server_));
  for (const char* service : {"", kServiceName}) {
    grpc::ClientContext context;
    HealthCheckRequest request;
    request.set_service(service);
    HealthCheckResponse response;
    ASSERT_TRUE(health->Check(&context, request, &response).ok()) << service;
    EXPECT_EQ(response.status(), HealthCheckResponse::SERVING) << service;
  }
  HealthCheckRequest request;
  request.set_service("no.such.Service");
  HealthCheckResponse response;
  EXPECT_EQ(health->Check(&context_, request, &response).error_code(), StatusCode::NOT_FOUND);
}

TEST_F(ServerTest, AnswersHealthAndReadinessOverHttp) {
  EXPECT_THAT(HttpGet(server_->metrics_address(), "/healthz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(HttpGet(server_->metrics_address(), "/readyz"), StartsWith("HTTP/1.1 200 OK\r\n"));
  EXPECT_THAT(HttpGet(server_->metrics_address(), "/secret"), HasSubstr(" 404 "));
}

TEST_F(ServerTest, SurvivesGarbageOnEitherPort) {
  std::string garbage = "\x16\x03\x01 not HTTP/2 at all \r\n\r\n";
  for (int i = 0; i < 4096; ++i) garbage += static_cast<char>(i * 7919 >> 3);
  Exchange(server_->grpc_address(), garbage);
  Exchange(server_->grpc_address(), "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + garbage);
  Exchange(server_->metrics_address(), garbage);
  ModelInferResponse response;
  EXPECT_TRUE(stub_->ModelInfer(&context_, HandComputed(), &response).ok());
  EXPECT_THAT(HttpGet(server_->metrics_address(), "/healthz"), HasSubstr("200 OK"));
}

TEST_F(ServerTest, ASecondServerOnItsPortsFailsWithOneLine) {
  const std::pair<std::string, std::string> cases[] = {
      {"--grpc_address=" + server_->grpc_address(), "--metrics_address=127.0.0.1:0"},
      {"--metrics_address=" + server_->metrics_address(), "--grpc_address=127.0.0.1:0"}};
  for (const auto& [taken, free] : cases) {
    ChildProcess second(ServerCommand({taken, free}));
    EXPECT_EQ(second.ReadLine(), "") << "it must not become ready";
    EXPECT_EQ(second.Wait(), 1);
    const std::string errors = second.Errors();
    EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
    EXPECT_THAT(errors, HasSubstr(taken.substr(taken.find('=') + 1)));
  }
}

// --- Separate servers ------------------------------------------------------------------------

TEST(ServerCommandLineTest, ABadLineGivesOneLineAndExitCodeTwo) {
  const std::pair<std::vector<std::string>, const char*> cases[] = {
      {{"--no_such_flag"}, "--no_such_flag"},
      {{"--threads=many"}, "'many'"},
      {{"serve"}, "'serve'"},
      {{"--backend=abacus"}, "'abacus'"},
      {{"--backend=cudnn", "--cudnn_libraries=/nowhere"}, "backend 'cudnn' can't run here: "},
      {{"--isa=mmx"}, "'mmx'"},
      {{"--grpc_address=0.0.0.0:0"}, "--insecure"},
      {{"--memory_budget_bytes=1"}, "--memory_budget_bytes is 1"},
  };
  for (const auto& [flags, named] : cases) {
    ChildProcess server(ServerCommand(flags));
    EXPECT_EQ(server.ReadLine(), "") << named;
    EXPECT_EQ(server.Wait(), 2) << named;
    const std::string errors = server.Errors();
    EXPECT_EQ(std::count(errors.begin(), errors.end(), '\n'), 1) << errors;
    EXPECT_THAT(errors, HasSubstr(named));
  }
}

TEST(ServerCommandLineTest, HelpAndVersionExitCleanly) {
  ChildProcess help(ServerCommand({"--help"}));
  EXPECT_THAT(help.ReadLine(), StartsWith("Usage: rapt-server"));
  while (!help.ReadLine().empty()) {
  }
  ChildProcess version(ServerCommand({"--version"}));
  EXPECT_THAT(version.ReadLine(), StartsWith("rapt-server "));
  EXPECT_EQ(version.Wait(), 0);
}

TEST(ServerCommandLineTest, ReadsTheEnvironment) {
  ChildProcess server(ServerCommand({}), {"RAPT_THREADS=many"});
  EXPECT_EQ(server.Wait(), 2);
  EXPECT_THAT(server.Errors(), HasSubstr("RAPT_THREADS"));
}

TEST(ServerCommandLineTest, RunsTheSelectedBackend) {
  const ServerProcess server({"--backend=reference"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  grpc::ClientContext context;
  ModelInferResponse response;
  ASSERT_TRUE(stub->ModelInfer(&context, HandComputed(), &response).ok());
  const auto& trailers = context.GetServerTrailingMetadata();
  const auto backend = trailers.find("rapt-backend");
  ASSERT_NE(backend, trailers.end());
  EXPECT_EQ(backend->second, "reference");
}

TEST(ServerLimitsTest, RejectsAMessageBeyondTheLimit) {
  const ServerProcess server({"--max_message_bytes=1000"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  grpc::ClientContext small, large;
  ModelInferResponse response;
  EXPECT_TRUE(stub->ModelInfer(&small, HandComputed(), &response).ok());
  EXPECT_EQ(stub->ModelInfer(&large, SelfAttention(std::vector<float>(300), 1, 30, 10), &response)
                .error_code(),
            StatusCode::RESOURCE_EXHAUSTED);
}

// A long call that the server computes.
class CallInFlight {
 public:
  CallInFlight(const ServerProcess& server, int64_t length)
      : stub_(GRPCInferenceService::NewStub(Connect(server))),
        status_(std::async(std::launch::async, [this, length] {
          return stub_->ModelInfer(&context_, LongRequest(length), &response_);
        })) {
    WaitUntilComputing(server);
  }

  void Cancel() { context_.TryCancel(); }
  grpc::Status Wait() { return status_.get(); }
  const ModelInferResponse& response() const { return response_; }

 private:
  grpc::ClientContext context_;
  ModelInferResponse response_;
  std::unique_ptr<GRPCInferenceService::Stub> stub_;
  std::future<grpc::Status> status_;
};

TEST(ServerCancellationTest, ACancelledCallEndsOnTheServer) {
  const ServerProcess server({"--backend=reference", "--threads=1"});
  CallInFlight in_flight(server, kEndless);
  in_flight.Cancel();
  EXPECT_EQ(in_flight.Wait().error_code(), StatusCode::CANCELLED);
  WaitForCount(server, "ModelInfer", "CANCELLED", 1);
  EXPECT_EQ(ReadMetric(server, "rapt_memory_reserved_bytes"), 0);
}

TEST(ServerCancellationTest, AGrpcDeadlineEndsTheCall) {
  const ServerProcess server({"--backend=reference", "--threads=1"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(100));
  ModelInferResponse response;
  EXPECT_EQ(stub->ModelInfer(&context, LongRequest(kEndless), &response).error_code(),
            StatusCode::DEADLINE_EXCEEDED);
}

TEST(ServerLogTest, InJsonEveryLineIsAnObject) {
  ServerProcess server(
      {"--backend=reference", "--threads=1", "--log_format=json", "--slow_call=1ms"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  grpc::ClientContext context;
  ModelInferResponse response;
  ASSERT_TRUE(stub->ModelInfer(&context, LongRequest(256), &response).ok());
  WaitForCount(server, "ModelInfer", "OK", 1);
  server.Terminate();
  EXPECT_EQ(server.Wait(), 0);
  std::map<std::string, google::protobuf::Struct> lines;  // by their event
  for (const absl::string_view line : absl::StrSplit(server.Log(), '\n', absl::SkipEmpty())) {
    google::protobuf::Struct object;
    const auto status =
        google::protobuf::util::JsonStringToMessage({line.data(), line.size()}, &object);
    EXPECT_TRUE(status.ok()) << line;
    lines[object.fields().at("event").string_value()] = object;
  }
  ASSERT_EQ(lines.count("ready"), 1u) << server.Log();
  EXPECT_EQ(lines["ready"].fields().at("threads").number_value(), 1);
  ASSERT_EQ(lines.count("slow call"), 1u) << server.Log();
  const auto& slow = lines["slow call"].fields();
  EXPECT_EQ(slow.at("method").string_value(), absl::StrCat(kServiceName, "/ModelInfer"));
  EXPECT_EQ(slow.at("code").string_value(), "OK");
  EXPECT_GE(slow.at("total_us").number_value(), slow.at("compute_us").number_value());
  EXPECT_THAT(slow.at("call").string_value(), StartsWith("B=1 Hq=2 Hkv=2 Sq=256 Sk=256 "));
  EXPECT_THAT(slow.at("plan").string_value(), StartsWith("reference"));
}

// A watch on the server's health that has seen it serving.
class HealthWatch {
 public:
  explicit HealthWatch(const ServerProcess& server)
      : stub_(grpc::health::v1::Health::NewStub(Connect(server))),
        reader_(stub_->Watch(&context_, {})) {
    EXPECT_EQ(Next(), HealthCheckResponse::SERVING);
  }
  ~HealthWatch() {
    context_.TryCancel();
    reader_->Finish();
  }

  HealthCheckResponse::ServingStatus Next() {
    HealthCheckResponse response;
    EXPECT_TRUE(reader_->Read(&response)) << "the watch ended";
    return response.status();
  }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::health::v1::Health::Stub> stub_;
  std::unique_ptr<grpc::ClientReader<HealthCheckResponse>> reader_;
};

TEST(ServerShutdownTest, AnIdleServerExitsAtOnceAndNotifiesWatchers) {
  for (const int signal_number : {SIGTERM, SIGINT}) {
    ServerProcess server({kDrainPause});
    HealthWatch watch(server);
    server.Signal(signal_number);
    EXPECT_EQ(watch.Next(), HealthCheckResponse::NOT_SERVING);
    EXPECT_EQ(server.Wait(), 0) << server.Log();
    EXPECT_THAT(server.Log(), HasSubstr(" INFO stopped"));
  }
}

TEST(ServerShutdownTest, FinishesACallInFlightAndRejectsNewOnes) {
  ServerProcess server(
      {kDrainPause, kDrainRefusalTime, "--backend=reference", "--threads=1", "--grace_period=1h"});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  HealthWatch watch(server);
  CallInFlight in_flight(server, kLong);
  server.Terminate();
  EXPECT_EQ(watch.Next(), HealthCheckResponse::NOT_SERVING);
  EXPECT_THAT(HttpGet(server.metrics_address(), "/readyz"), HasSubstr(" 503 "));
  // Calls are still accepted during --drain_pause, then rejected.
  grpc::Status refusal;
  do {
    grpc::ClientContext context;
    ModelInferResponse late;
    refusal = stub->ModelInfer(&context, HandComputed(), &late);
  } while (refusal.ok());
  EXPECT_EQ(refusal.error_code(), StatusCode::UNAVAILABLE) << refusal.error_message();
  EXPECT_THAT(refusal.error_message(), HasSubstr("draining"));

  const grpc::Status status = in_flight.Wait();
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_THAT(Floats(in_flight.response().raw_output_contents(0)), ::testing::Each(0.5f));
  EXPECT_EQ(server.Wait(), 0) << server.Log();
}

TEST(ServerShutdownTest, ACallWhoseMessageIsOnItsWayIsNotRefused) {
  ServerProcess server(
      {kDrainPause, kDrainRefusalTime, "--min_receive_bytes_per_second=1", "--grace_period=1h"});
  const std::string message = test::Prefixed(HandComputed().SerializeAsString());
  test::RawHttp2 connection(server.grpc_address());
  connection.OpenCall(1, test::CallHeaders(absl::StrCat("/", kServiceName, "/ModelInfer")));
  connection.SendData(1, message.substr(0, message.size() / 2));
  test::WaitForPage(server, "memory for the message", [](const std::string& page) {
    return test::SumOnPage(page, "rapt_memory_reserved_bytes", {{"kind", "receive"}}) > 0;
  });
  server.Terminate();
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  for (bool is_refused = false; !is_refused;) {
    grpc::ClientContext context;
    ModelInferResponse response;
    is_refused = !stub->ModelInfer(&context, HandComputed(), &response).ok();
  }
  connection.SendData(1, message.substr(message.size() / 2), /*ends=*/true);
  EXPECT_EQ(connection.ReadResponse(1)["grpc-status"], "0");
  EXPECT_EQ(server.Wait(), 0) << server.Log();
}

TEST(ServerShutdownTest, EveryAcceptedCallIsAnsweredUnderLoad) {
  ServerProcess server({kDrainPause, kDrainRefusalTime});
  const auto stub = GRPCInferenceService::NewStub(Connect(server));
  const ModelInferRequest request =
      SelfAttention(std::vector<float>(4 * 200 * 64, 0.25f), 4, 200, 64);
  std::atomic<int> computed{0}, refused{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (;;) {
        grpc::ClientContext context;
        ModelInferResponse response;
        const grpc::Status status = stub->ModelInfer(&context, request, &response);
        if (status.error_message().find("draining") != std::string::npos) ++refused;
        if (!status.ok()) return;
        EXPECT_THAT(Floats(response.raw_output_contents(0)), ::testing::Each(0.25f));
        ++computed;
      }
    });
  }
  while (computed < 20) std::this_thread::yield();
  server.Terminate();
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(server.Wait(), 0) << server.Log();
  EXPECT_THAT(server.Log(), Not(HasSubstr("grace period expired")));
  // Other failed calls never reached the service.
  EXPECT_THAT(server.Log(), HasSubstr(absl::StrCat("served_calls=", computed + refused, "\n")));
}

TEST(ServerShutdownTest, ACallBeyondTheGracePeriodIsCancelled) {
  ServerProcess server({"--backend=reference", "--threads=1", "--grace_period=1ms"});
  CallInFlight in_flight(server, kEndless);
  server.Terminate();
  EXPECT_FALSE(in_flight.Wait().ok());
  EXPECT_EQ(server.Wait(), 0) << server.Log();
  EXPECT_THAT(server.Log(), HasSubstr("grace period expired"));
}

TEST(ServerShutdownTest, ASecondSignalEndsItAtOnce) {
  ServerProcess server({"--backend=reference", "--threads=1"});
  HealthWatch watch(server);
  CallInFlight in_flight(server, kEndless);
  server.Terminate();
  EXPECT_EQ(watch.Next(), HealthCheckResponse::NOT_SERVING) << "the first signal has been handled";
  server.Terminate();
  EXPECT_EQ(server.Wait(), -SIGTERM) << server.Log();
  EXPECT_FALSE(in_flight.Wait().ok());
}

}  // namespace
}  // namespace rapt
