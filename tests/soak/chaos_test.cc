// Calls of every method that break off at random points, over plain text and TLS, for
// RAPT_CHAOS_SECONDS (5 by default). Meanwhile and afterwards the server answers correctly, and
// afterwards it holds nothing.
#include <gmock/gmock.h>
#include <google/protobuf/descriptor.h>
#include <gtest/gtest.h>
#include <nghttp2/nghttp2.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "proto/grpc/health/v1/health.pb.h"
#include "proto/grpc/reflection/v1/reflection.pb.h"
#include "proto/grpc/reflection/v1alpha/reflection.pb.h"
#include "proto/inference/grpc_service.pb.h"
#include "proto/rapt/v1/attention.pb.h"
#include "rapt/client.h"
#include "tests/support/callers.h"
#include "tests/support/certificates.h"
#include "tests/support/corrupt.h"
#include "tests/support/memory_watch.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_http2.h"
#include "tests/support/server_process.h"
#include "tests/support/shared_object.h"

namespace rapt::test {
namespace {

using std::chrono::milliseconds;
using ::testing::Each;
using ::testing::Gt;

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kBudget = 256 * kMiB;
constexpr int kMaxOpenCalls = 256;
constexpr int kAttackers = 4;
constexpr size_t kMaxFrameBytes = 16384;
constexpr char kWatch[] = "/grpc.health.v1.Health/Watch";
constexpr char kRegion[] = "chaos";

std::chrono::duration<double> TimeOfChaos() {
  const char* seconds = std::getenv("RAPT_CHAOS_SECONDS");
  return std::chrono::duration<double>(seconds == nullptr ? 5 : std::atof(seconds));
}

// --- Methods -------------------------------------------------------------------------------------

// Tensors of 0.5, whose attention is 0.5, too.
constexpr int64_t kLength = 16, kHeadSize = 64;
constexpr int64_t kTensorBytes = kLength * kHeadSize * int64_t{sizeof(float)};

std::string Halves(int64_t rows) {
  const std::vector<float> values(rows * kHeadSize, 0.5f);
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// A method, and what a caller sends to it.
struct Method {
  std::string path;
  std::vector<std::string> messages = {""};
  std::string answer = {};  // a part of it
};

// Without the bytes of its tensors.
inference::ModelInferRequest InferRequest(int64_t length = kLength, int64_t head_size = kHeadSize) {
  inference::ModelInferRequest request;
  request.set_model_name("attention");
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {int64_t{1}, int64_t{1}, length, head_size}) input.add_shape(axis);
  }
  return request;
}

std::string InferMessage() {
  inference::ModelInferRequest request = InferRequest();
  for (int n = 0; n < 3; ++n) request.add_raw_input_contents(Halves(kLength));
  return request.SerializeAsString();
}

std::string SharedInferMessage() {
  inference::ModelInferRequest request = InferRequest();
  for (auto& input : *request.mutable_inputs()) Share(input, kRegion, 0, kTensorBytes);
  return request.SerializeAsString();
}

// A small request with an answer of 1 MiB.
std::string WeightsMessage() {
  constexpr int64_t kRows = 512;
  inference::ModelInferRequest request = InferRequest(kRows, /*head_size=*/1);
  for (int n = 0; n < 3; ++n) request.add_raw_input_contents(Halves(kRows / kHeadSize));
  request.add_outputs()->set_name("qk_matmul_output");
  return request.SerializeAsString();
}

v1::AttendRequest AttendRequest() {
  v1::AttendRequest request;
  for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
    tensor->set_dtype(v1::FP32);
    for (const int64_t axis : {int64_t{1}, int64_t{1}, kLength, kHeadSize}) tensor->add_shape(axis);
    tensor->set_data(Halves(kLength));
  }
  return request;
}

// The gradient of V is that of Y: every query attends to all keys alike.
std::string BackwardMessage() {
  v1::AttendBackwardRequest request;
  *request.mutable_call() = AttendRequest();
  *request.mutable_dy() = request.call().q();
  return request.SerializeAsString();
}

std::string DiagnoseMessage() {
  v1::DiagnoseRequest request;
  *request.mutable_call() = AttendRequest();
  return request.SerializeAsString();
}

std::string EstimateMessage() {
  v1::EstimateMemoryRequest request;
  request.set_batch(1);
  request.set_query_heads(1);
  request.add_lengths(1024);
  return request.SerializeAsString();
}

// The header, the queries, and the keys in chunks.
std::vector<std::string> StreamMessages() {
  constexpr int64_t kChunk = 4;
  std::vector<v1::AttendStreamRequest> messages(2);
  v1::AttendStreamHeader& header = *messages[0].mutable_header();
  header.set_direction(v1::KEYS_STREAM);
  header.set_dtype(v1::FP32);
  header.set_batch(1);
  header.set_query_heads(1);
  header.set_kv_heads(1);
  header.set_query_length(kLength);
  header.set_key_length(kLength);
  header.set_head_size(kHeadSize);
  header.set_value_head_size(kHeadSize);
  header.set_query_chunk(kLength);
  header.set_key_chunk(kChunk);
  messages[1].mutable_queries()->set_count(kLength);
  messages[1].mutable_queries()->set_q(Halves(kLength));
  for (int64_t begin = 0; begin < kLength; begin += kChunk) {
    v1::KeyChunk& chunk = *messages.emplace_back().mutable_keys();
    chunk.set_offset(begin);
    chunk.set_count(kChunk);
    chunk.set_k(Halves(kChunk));
    chunk.set_v(Halves(kChunk));
  }
  std::vector<std::string> texts;
  for (const auto& message : messages) texts.push_back(message.SerializeAsString());
  return texts;
}

std::vector<std::string> ReflectionMessages() {
  grpc::reflection::v1::ServerReflectionRequest services, symbol;
  services.set_list_services("");
  symbol.set_file_containing_symbol("rapt.v1.AttentionService");
  return {services.SerializeAsString(), symbol.SerializeAsString()};
}

std::string ModelNamed(const std::string& name) {
  inference::ModelReadyRequest request;  // all messages with a model's name have it in this field
  request.set_name(name);
  return request.SerializeAsString();
}

std::string RegisterMessage(const SharedObject& object) {
  inference::SystemSharedMemoryRegisterRequest request;
  request.set_name(kRegion);
  request.set_key(object.key());
  request.set_byte_size(static_cast<uint64_t>(object.size()));
  return request.SerializeAsString();
}

// What a caller sends to the methods that need more than an empty message.
std::map<std::string, Method> Conversations(const SharedObject& object) {
  const std::string answer = Halves(kLength);
  std::map<std::string, Method> conversations;
  const auto add = [&conversations](Method method) { conversations[method.path] = method; };
  const std::string oip = "/inference.GRPCInferenceService/", native = "/rapt.v1.AttentionService/";
  for (const char* name : {"ModelReady", "ModelMetadata", "ModelConfig", "ModelStatistics"}) {
    add({oip + name, {ModelNamed("attention")}});
  }
  add({oip + "ModelInfer", {InferMessage()}, answer});
  add({oip + "ModelStreamInfer", {InferMessage(), InferMessage()}, answer});
  add({oip + "SystemSharedMemoryRegister", {RegisterMessage(object)}});
  add({native + "Attend", {AttendRequest().SerializeAsString()}, answer});
  add({native + "AttendBackward", {BackwardMessage()}, answer});
  add({native + "AttendStream", StreamMessages(), answer});
  add({native + "Diagnose", {DiagnoseMessage()}, "cpu"});
  add({native + "EstimateMemory", {EstimateMessage()}});
  for (const char* version : {"v1", "v1alpha"}) {
    add({absl::StrCat("/grpc.reflection.", version, ".ServerReflection/ServerReflectionInfo"),
         ReflectionMessages(), "rapt.v1.AttentionService"});
  }
  return conversations;
}

// Every method of every service, then further conversations. The last one unregisters all regions.
std::vector<Method> AllMethods(const SharedObject& object) {
  std::map<std::string, Method> conversations = Conversations(object);
  std::vector<Method> methods;
  for (const google::protobuf::Descriptor* message :
       {inference::ModelInferRequest::descriptor(), v1::AttendRequest::descriptor(),
        grpc::health::v1::HealthCheckRequest::descriptor(),
        grpc::reflection::v1::ServerReflectionRequest::descriptor(),
        grpc::reflection::v1alpha::ServerReflectionRequest::descriptor()}) {
    const google::protobuf::ServiceDescriptor& service = *message->file()->service(0);
    for (int n = 0; n < service.method_count(); ++n) {
      const std::string path =
          absl::StrCat("/", service.full_name(), "/", service.method(n)->name());
      const auto found = conversations.extract(path);
      methods.push_back(found.empty() ? Method{path} : found.mapped());
    }
  }
  EXPECT_TRUE(conversations.empty()) << "unknown method " << conversations.begin()->first;
  const std::string oip = "/inference.GRPCInferenceService/";
  methods.push_back({oip + "ModelInfer", {WeightsMessage()}});
  methods.push_back({oip + "SystemSharedMemoryRegister", {RegisterMessage(object)}});
  methods.push_back({oip + "ModelInfer", {SharedInferMessage()}, Halves(kLength)});
  methods.push_back({oip + "SystemSharedMemoryUnregister"});
  return methods;
}

// --- A server and its honest callers -------------------------------------------------------------

class Server {
 public:
  explicit Server(Security security)
      : security_(security), process_(Flags()), start_(GaugesAtRest()) {}

  const ServerProcess& process() const { return process_; }
  RawHttp2 Connect() const { return RawHttp2(process_.grpc_address(), security_); }

  // Returns the gRPC status of the call. An OK contains the method's answer.
  std::string Call(const Method& method) const {
    RawHttp2 connection = Connect();
    SendWindows(connection);
    Headers headers;
    if (method.path == kWatch) headers = {{"grpc-timeout", "1S"}};  // it does not end otherwise
    connection.OpenCall(1, CallHeaders(method.path, headers));
    for (const std::string& message : method.messages) connection.SendData(1, Prefixed(message));
    connection.SendData(1, "", /*ends=*/true);
    std::string answer;
    for (;;) {
      const auto frame = connection.Read();
      if (!frame || frame->type == NGHTTP2_RST_STREAM) return "none";
      if (frame->type == NGHTTP2_DATA) answer += frame->payload;
      const auto status = frame->headers.find("grpc-status");
      if (status == frame->headers.end()) continue;
      if (status->second == "0") {
        EXPECT_TRUE(absl::StrContains(answer, method.answer)) << method.path;
      }
      return status->second;
    }
  }

  // The statuses of all methods.
  std::vector<std::string> CallAll(const std::vector<Method>& methods) const {
    Call(methods.back());  // unregisters the regions that others have left
    std::vector<std::string> statuses;
    for (const Method& method : methods) {
      statuses.push_back(absl::StrCat(method.path, " ", Call(method)));
    }
    return statuses;
  }

  // Fails the test unless as many calls without tensors as the limit says can be open.
  void ExpectAllPlacesAreFree() const {
    RawHttp2 connection = Connect();
    for (uint32_t n = 0; n < kMaxOpenCalls; ++n) {
      connection.OpenCall(2 * n + 1, CallHeaders(kWatch));
      connection.SendData(2 * n + 1, Prefixed(""), /*ends=*/true);
      const auto frame = connection.ReadUntil(NGHTTP2_HEADERS);
      ASSERT_TRUE(frame);
      ASSERT_FALSE(frame->headers.contains("grpc-status")) << n << " places of " << kMaxOpenCalls;
    }
  }

  // Blocks until all gauges are what they were at the start.
  void WaitUntilAtRest() const {
    WaitForPage(process_, "the gauges of the start",
                [this](const std::string& page) { return GaugesOf(page) == start_; });
  }

  // A large message, with flow control both ways.
  absl::Status AttendAndCheck(client::Client& client) const {
    static const std::vector<float> x(1024 * kHeadSize * 4, 0.5f);  // 1 MiB
    const client::TensorView tokens = client::View<float>({4, 1, 1024, kHeadSize}, x);
    const client::TensorView keys =
        client::View<float>({4, 1, 1, kHeadSize}, absl::MakeSpan(x).subspan(0, 4 * kHeadSize));
    const auto result = client.Attend({.q = tokens, .k = keys, .v = keys});
    if (!result.ok()) return result.status();
    const auto y = result->y.values<float>();
    const bool is_right = std::all_of(y.begin(), y.end(), [](float v) { return v == 0.5f; });
    return is_right ? absl::OkStatus() : absl::InternalError("expected 0.5 everywhere");
  }

  std::unique_ptr<client::Client> ConnectClient() const {
    client::Options options{.retries = {.max_attempts = 1}};
    if (security_ == Security::kTls) options.tls = {.ca_file = certificate_.authority_file()};
    auto client = client::Client::Connect(process_.grpc_address(), options);
    EXPECT_TRUE(client.ok()) << client.status();
    return client.ok() ? *std::move(client) : nullptr;
  }

 private:
  using Gauges = std::map<std::string, std::string>;

  static void SendWindows(RawHttp2& connection) {
    connection.Send(Frame(NGHTTP2_SETTINGS, 0, 0, std::string("\0\4", 2) + BigEndian(kMaxWindow)) +
                    Frame(NGHTTP2_WINDOW_UPDATE, 0, 0, BigEndian(kMaxWindow / 2)));
  }

  // All gauges, except for memory that the process keeps for later.
  static Gauges GaugesOf(const std::string& page) {
    Gauges gauges;
    std::string gauge;
    for (const absl::string_view line : absl::StrSplit(page, '\n')) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      if (words.size() == 4 && words[1] == "TYPE") gauge = words[3] == "gauge" ? words[2] : "";
      if (gauge.empty() || words.size() != 2 || !absl::StartsWith(line, gauge)) continue;
      if (absl::EndsWith(gauge, "_memory_bytes") || gauge == "rapt_pool_idle_bytes") continue;
      gauges[words[0]] = words[1];
    }
    return gauges;
  }

  Gauges GaugesAtRest() const {
    WaitForMetric(process_, "rapt_compute_threads_busy", 0);  // the canary
    return GaugesOf(ReadMetricsPage(process_));
  }

  std::vector<std::string> Flags() const {
    std::vector<std::string> flags = {"--threads=2", "--allow_shared_memory",
                                      absl::StrCat("--memory_budget_bytes=", kBudget),
                                      absl::StrCat("--max_open_calls=", kMaxOpenCalls),
                                      absl::StrCat("--max_calls_per_caller=", kMaxOpenCalls)};
    if (security_ == Security::kPlainText) return flags;
    for (const std::string& flag : certificate_.Flags()) flags.push_back(flag);
    return flags;
  }

  static constexpr uint32_t kMaxWindow = 0x7FFFFFFF;

  const Security security_;
  const ServerCertificate certificate_;
  const ServerProcess process_;
  const Gauges start_;
};

// --- Chaos ---------------------------------------------------------------------------------------

// One thread's random choices.
class Chaos {
 public:
  Chaos(const std::vector<Method>& methods, unsigned seed)
      : methods_(methods), calls_(methods.size()), random_(seed) {}

  // A connection with a few calls. Some are complete; the others break off.
  void Converse(const Server& server) {
    std::string bytes = Calls();
    if (OneIn(3)) bytes.resize(Below(bytes.size()));
    if (OneIn(16)) bytes = Corrupt(bytes, random_);
    RawHttp2 connection = server.Connect();
    while (!bytes.empty()) {
      const size_t size = 1 + Below(OneIn(2) ? 100'000 : 1000);
      if (!connection.Send(bytes.substr(0, size))) return;
      bytes.erase(0, size);
      if (OneIn(4)) connection.Discard(milliseconds(Below(3)));
    }
    if (OneIn(2)) connection.Discard(milliseconds(Below(30)));
  }

  // How many calls of each method began.
  const std::vector<int64_t>& calls() const { return calls_; }

 private:
  size_t Below(size_t n) { return random_() % n; }
  bool OneIn(size_t n) { return Below(n) == 0; }

  Headers MoreHeaders() {
    switch (Below(10)) {
      case 0:
        return {{"grpc-timeout", "0n"}};
      case 1:
        return {{"grpc-timeout", absl::StrCat(Below(20), "m")}};
      case 2:
        return {{"grpc-timeout", "soon"}};
      case 3:
        return {{"content-length", "7"}};
      case 4:
        return {{"grpc-encoding", "gzip"}};
      default:
        return {};
    }
  }

  // The messages of a call: some damaged, longer than they are, or cut off.
  std::string Body(const Method& method) {
    std::string body;
    for (const std::string& message : method.messages) {
      const std::string sent = OneIn(8) ? Corrupt(message, random_) : message;
      body += OneIn(8) ? Prefixed(sent, Below(4 * kMiB)) : Prefixed(sent);
    }
    if (OneIn(4)) body.resize(Below(body.size()));
    if (OneIn(8)) {
      std::generate(body.begin(), body.end(), [this] { return static_cast<char>(random_()); });
    }
    return body;
  }

  // The frames of a call, in order.
  std::deque<std::string> FramesOf(const Method& method, uint32_t stream) {
    std::deque<std::string> frames = {Frame(NGHTTP2_HEADERS, NGHTTP2_FLAG_END_HEADERS, stream,
                                            HeaderBlock(CallHeaders(method.path, MoreHeaders())))};
    const std::string body = Body(method);
    for (size_t begin = 0, size; begin < body.size(); begin += size) {
      size = 1 + Below(kMaxFrameBytes);
      frames.push_back(Frame(NGHTTP2_DATA, 0, stream, body.substr(begin, size)));
    }
    if (!OneIn(4)) frames.push_back(Frame(NGHTTP2_DATA, NGHTTP2_FLAG_END_STREAM, stream, ""));
    if (OneIn(4)) {
      frames.resize(1 + Below(frames.size()));
      frames.push_back(Frame(NGHTTP2_RST_STREAM, 0, stream, BigEndian(NGHTTP2_CANCEL)));
    }
    return frames;
  }

  // The peer's window for each response: none, HTTP/2's, or any.
  std::string Settings() {
    switch (Below(3)) {
      case 0:
        return Frame(NGHTTP2_SETTINGS, 0, 0, std::string("\0\4", 2) + BigEndian(0));
      case 1:
        return Frame(NGHTTP2_WINDOW_UPDATE, 0, 0, BigEndian(1 << 30)) +
               Frame(NGHTTP2_SETTINGS, 0, 0, std::string("\0\4", 2) + BigEndian(1 << 30));
      default:
        return "";
    }
  }

  // The frames of some calls, in turn.
  std::string Calls() {
    std::string bytes = Settings();
    std::vector<std::deque<std::string>> open;
    const auto send_one = [&](size_t n) {
      bytes += open[n].front();
      open[n].pop_front();
      if (open[n].empty()) open.erase(open.begin() + static_cast<int64_t>(n));
    };
    size_t unopened = 1 + Below(6);
    for (uint32_t stream = 1; unopened > 0 || !open.empty();) {
      if (unopened > 0 && (open.empty() || OneIn(3))) {
        const size_t method = next_++ % methods_.size();
        ++calls_[method];
        open.push_back(FramesOf(methods_[method], stream));
        send_one(open.size() - 1);
        --unopened;
        stream += 2;
      } else {
        send_one(Below(open.size()));
      }
    }
    return bytes;
  }

  const std::vector<Method>& methods_;
  std::vector<int64_t> calls_;
  std::mt19937 random_;
  size_t next_ = 0;
};

class ChaosTest : public ::testing::TestWithParam<Security> {};

TEST_P(ChaosTest, OfAllMethodsLeavesNothingBehind) {
  const SharedObject object(kTensorBytes);
  std::fill_n(object.Values<float>(0, kLength * kHeadSize).data(), kLength * kHeadSize, 0.5f);
  const std::vector<Method> methods = AllMethods(object);
  const Server server(GetParam());
  const std::vector<std::string> statuses = server.CallAll(methods);
  const int64_t before = RssAnonBytes(server.process().pid());
  const MemoryWatch memory(server.process().pid());
  std::vector<int64_t> calls(methods.size());
  {
    const std::unique_ptr<client::Client> client = server.ConnectClient();
    ASSERT_NE(client, nullptr);
    Callers honest(1, [&] { return server.AttendAndCheck(*client); });
    std::vector<Chaos> chaos;
    for (unsigned seed = 0; seed < kAttackers; ++seed) chaos.emplace_back(methods, seed);
    const auto end = std::chrono::steady_clock::now() + TimeOfChaos();
    std::vector<std::thread> attackers;
    for (Chaos& attacker : chaos) {
      attackers.emplace_back([&] {
        while (std::chrono::steady_clock::now() < end) attacker.Converse(server);
      });
    }
    for (std::thread& attacker : attackers) attacker.join();
    honest.WaitForMore(1);
    EXPECT_EQ(honest.Stop(), absl::OkStatus());
    for (const Chaos& attacker : chaos) {
      for (size_t n = 0; n < calls.size(); ++n) calls[n] += attacker.calls()[n];
    }
  }
  EXPECT_THAT(calls, Each(Gt(0)));
  EXPECT_EQ(server.CallAll(methods), statuses);
  server.WaitUntilAtRest();
  server.ExpectAllPlacesAreFree();
  server.WaitUntilAtRest();
  const int64_t growth = memory.peak() - before;
  if (kRssIsMeaningful) {
    EXPECT_LT(growth, kBudget + 128 * kMiB + kMaxOpenCalls * 68 * 1024);
  }
  std::printf("chaos: %ld calls of %zu kinds, memory grew by at most %ld MiB\n",
              static_cast<long>(std::accumulate(calls.begin(), calls.end(), int64_t{0})),
              calls.size(), static_cast<long>(growth / kMiB));
}

INSTANTIATE_TEST_SUITE_P(, ChaosTest, ::testing::Values(Security::kPlainText, Security::kTls),
                         [](const auto& info) {
                           return std::string(info.param == Security::kTls ? "Tls" : "PlainText");
                         });

}  // namespace
}  // namespace rapt::test
