// LinearAttendStream of the real rapt-server, compared with its LinearAttend.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "tests/support/memory_watch.h"
#include "tests/support/metrics_page.h"
#include "tests/support/server_process.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using grpc::StatusCode;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using Stub = v1::AttentionService::Stub;
using Request = v1::LinearAttendRequest;
using Response = v1::LinearAttendResponse;

constexpr int64_t kMiB = 1 << 20;
constexpr int64_t kBatch = 2, kHeads = 2, kQueryHeads = 4, kKeySize = 8, kValueSize = 6;

std::unique_ptr<Stub> Connect(const std::string& address) {
  return v1::AttentionService::NewStub(
      grpc::CreateChannel(address, grpc::InsecureChannelCredentials()));
}

// --- Messages ------------------------------------------------------------------------------------

void Set(v1::Tensor& tensor, std::vector<int64_t> shape, double low, double high, Rng& rng) {
  int64_t count = 1;
  for (const int64_t axis : shape) count *= axis;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = static_cast<float>(Uniform(rng, low, high));
  tensor.set_dtype(v1::FP32);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  tensor.set_data(values.data(), values.size() * sizeof(float));
}

void SetHeads(Request& request, int64_t query_heads = kQueryHeads) {
  request.set_q_num_heads(query_heads);
  request.set_kv_num_heads(kHeads);
}

// Tokens of rule gated_delta.
Request Tokens(int64_t count, Rng& rng) {
  Request m;
  Set(*m.mutable_query(), {kBatch, count, kQueryHeads * kKeySize}, -1, 1, rng);
  Set(*m.mutable_key(), {kBatch, count, kHeads * kKeySize}, -0.3, 0.3, rng);
  Set(*m.mutable_value(), {kBatch, count, kHeads * kValueSize}, -1, 1, rng);
  Set(*m.mutable_decay(), {kBatch, count, kHeads}, -1, 0, rng);
  Set(*m.mutable_beta(), {kBatch, count, 1}, 0, 1, rng);
  return m;
}

// The same tokens for FAVOR+ over two heads.
Request TokensOfFavor(int64_t count, Rng& rng) {
  Request m;
  for (v1::Tensor* tensor : {m.mutable_query(), m.mutable_key(), m.mutable_value()}) {
    Set(*tensor, {kBatch, count, kHeads * kKeySize}, -1, 1, rng);
  }
  return m;
}

std::vector<Request> GatedDelta() {
  Rng rng(1);
  std::vector<Request> messages = {Tokens(5, rng), Tokens(1, rng), Tokens(70, rng), Tokens(0, rng),
                                   Tokens(30, rng)};
  SetHeads(messages[0]);
  Set(*messages[0].mutable_past_state(), {kBatch, kHeads, kKeySize, kValueSize}, -1, 1, rng);
  messages[0].set_scale(0.5);
  messages[0].set_state_type(v1::BF16);
  messages[2].add_nonpad_kv_seqlen(0);
  messages[2].add_nonpad_kv_seqlen(66);
  messages[2].set_want_present_state(true);
  messages[4].set_want_present_state(true);
  return messages;
}

std::vector<Request> Favor(bool has_projection) {
  Rng rng(2);
  std::vector<Request> messages = {TokensOfFavor(40, rng), TokensOfFavor(1, rng),
                                   TokensOfFavor(9, rng)};
  SetHeads(messages[0], kHeads);
  messages[0].set_update_rule(v1::UPDATE_LINEAR);
  messages[0].set_feature_map(v1::FEATURE_MAP_FAVOR);
  if (has_projection) {
    Set(*messages[0].mutable_projection(), {20, kKeySize}, -1, 1, rng);
  } else {
    messages[0].set_num_features(20);
    messages[0].set_seed(7);
  }
  messages[2].set_want_present_state(true);
  messages[2].set_want_present_normalizer(true);
  return messages;
}

// --- Calls ---------------------------------------------------------------------------------------

struct Responses {
  std::vector<Response> messages;
  grpc::Status status;
};

class Caller {
 public:
  explicit Caller(Stub& stub, milliseconds timeout = seconds(60)) {
    context_.set_deadline(std::chrono::system_clock::now() + timeout);
    stream_ = stub.LinearAttendStream(&context_);
  }

  bool Write(const Request& request) { return stream_->Write(request); }
  bool Read(Response& response) { return stream_->Read(&response); }
  bool Exchange(const Request& request, Response& response) {
    return Write(request) && Read(response);
  }
  void HalfClose() { stream_->WritesDone(); }
  grpc::Status Finish() { return stream_->Finish(); }
  void Cancel() { context_.TryCancel(); }

 private:
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<Request, Response>> stream_;
};

// Sends all messages ahead of the responses.
Responses Stream(Stub& stub, const std::vector<Request>& messages) {
  Caller caller(stub);
  std::thread writer([&] {
    for (const Request& message : messages) {
      if (!caller.Write(message)) return;
    }
    caller.HalfClose();
  });
  Responses responses;
  for (Response response; caller.Read(response);) responses.messages.push_back(response);
  writer.join();
  responses.status = caller.Finish();
  return responses;
}

// Sends them as LinearAttend, each with the state of the one before.
std::vector<Response> SendEach(Stub& stub, const std::vector<Request>& messages) {
  std::vector<Response> responses;
  Request attributes = messages[0];
  for (const char* name : {"query", "key", "value", "decay", "beta", "past_state",
                           "past_normalizer", "want_present_state", "want_present_normalizer"}) {
    Request::GetReflection()->ClearField(&attributes, Request::descriptor()->FindFieldByName(name));
  }
  for (const Request& message : messages) {
    Request request = attributes;
    request.MergeFrom(message);
    if (responses.empty()) request = message;
    request.set_want_present_state(true);
    request.set_want_present_normalizer(attributes.feature_map() == v1::FEATURE_MAP_FAVOR);
    if (!responses.empty()) {
      *request.mutable_past_state() = responses.back().present_state();
      if (responses.back().has_present_normalizer()) {
        *request.mutable_past_normalizer() = responses.back().present_normalizer();
      }
    }
    grpc::ClientContext context;
    const grpc::Status status = stub.LinearAttend(&context, request, &responses.emplace_back());
    EXPECT_TRUE(status.ok()) << status.error_message();
  }
  return responses;
}

class LinearStreamTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new ServerProcess({"--threads=2"}); }
  static void TearDownTestSuite() { delete server_; }

  static ServerProcess* server_;
  std::unique_ptr<Stub> stub_ = Connect(server_->grpc_address());
};
ServerProcess* LinearStreamTest::server_ = nullptr;

TEST_F(LinearStreamTest, EqualsCallsThatHandTheStateOn) {
  for (const std::vector<Request>& messages : {GatedDelta(), Favor(false), Favor(true)}) {
    const Responses got = Stream(*stub_, messages);
    ASSERT_TRUE(got.status.ok()) << got.status.error_message();
    const std::vector<Response> want = SendEach(*stub_, messages);
    ASSERT_EQ(got.messages.size(), want.size());
    for (size_t n = 0; n < want.size(); ++n) {
      SCOPED_TRACE(n);
      const Response& response = got.messages[n];
      EXPECT_EQ(response.output().SerializeAsString(), want[n].output().SerializeAsString());
      EXPECT_EQ(response.has_present_state(), messages[n].want_present_state());
      EXPECT_EQ(response.has_present_normalizer(), messages[n].want_present_normalizer());
      if (messages[n].want_present_state()) {
        EXPECT_EQ(response.present_state().SerializeAsString(),
                  want[n].present_state().SerializeAsString());
      }
      if (messages[n].want_present_normalizer()) {
        EXPECT_EQ(response.present_normalizer().SerializeAsString(),
                  want[n].present_normalizer().SerializeAsString());
      }
      EXPECT_EQ(response.plan(), want[n].plan());
      EXPECT_TRUE(response.has_timing());
    }
  }
  WaitUntilNothingIsHeld(*server_);
}

TEST_F(LinearStreamTest, AStreamWithoutMessagesIsEmpty) {
  const Responses responses = Stream(*stub_, {});
  EXPECT_TRUE(responses.status.ok()) << responses.status.error_message();
  EXPECT_TRUE(responses.messages.empty());
}

TEST_F(LinearStreamTest, TheFirstErrorEndsTheStream) {
  struct {
    const char* message;
    size_t at;
    void (*change)(Request&);
  } const kCases[] = {
      {"query is missing", 0, [](Request& r) { r.clear_query(); }},
      {"key is missing", 1, [](Request& r) { r.clear_key(); }},
      {"decay is missing; update_rule is gated_delta", 1, [](Request& r) { r.clear_decay(); }},
      {"scale is set in a later message; only the first message of a stream sets it", 1,
       [](Request& r) { r.set_scale(1); }},
      {"past_state is set in a later message", 2,
       [](Request& r) { *r.mutable_past_state() = r.query(); }},
      {"is_causal is set in a later message", 1, [](Request& r) { r.set_is_causal(true); }},
      {"query is in shared memory; it must be in the message", 0,
       [](Request& r) { r.mutable_query()->mutable_shared_memory()->set_region("region"); }},
      {"present_normalizer is requested; it needs normalize", 2,
       [](Request& r) { r.set_want_present_normalizer(true); }},
      {"past_state has shape [2, 2, 8, 6]; it must be [1, 2, 8, 6]", 1,
       [](Request& r) {
         Rng rng(3);
         Set(*r.mutable_query(), {1, 1, kQueryHeads * kKeySize}, -1, 1, rng);
         Set(*r.mutable_key(), {1, 1, kHeads * kKeySize}, -1, 1, rng);
         Set(*r.mutable_value(), {1, 1, kHeads * kValueSize}, -1, 1, rng);
         Set(*r.mutable_decay(), {1, 1, kHeads}, -1, 0, rng);
         Set(*r.mutable_beta(), {1, 1, 1}, 0, 1, rng);
       }},
  };
  for (const auto& c : kCases) {
    SCOPED_TRACE(c.message);
    std::vector<Request> messages = GatedDelta();
    c.change(messages[c.at]);
    const Responses responses = Stream(*stub_, messages);
    EXPECT_EQ(responses.status.error_code(), StatusCode::INVALID_ARGUMENT);
    EXPECT_THAT(responses.status.error_message(), HasSubstr(c.message));
    EXPECT_EQ(responses.messages.size(), c.at);
  }
  WaitUntilNothingIsHeld(*server_);
}

TEST_F(LinearStreamTest, ACallerThatDisconnectsHoldsNothing) {
  const std::vector<Request> messages = GatedDelta();
  Caller caller(*stub_);
  Response response;
  ASSERT_TRUE(caller.Exchange(messages[0], response));
  EXPECT_GT(ReadMetric(*server_, "rapt_memory_reserved_bytes"), 0);
  caller.Cancel();
  EXPECT_EQ(caller.Finish().error_code(), StatusCode::CANCELLED);
  WaitUntilNothingIsHeld(*server_);
}

TEST_F(LinearStreamTest, IsCountedOnce) {
  const std::map<std::string, std::string> labels = {
      {"method", "rapt.v1.AttentionService/LinearAttendStream"}, {"code", "OK"}};
  const double before = std::max(0.0, ReadMetric(*server_, "rapt_requests_total", labels));
  ASSERT_TRUE(Stream(*stub_, GatedDelta()).status.ok());
  WaitForMetric(*server_, "rapt_requests_total", before + 1, labels);
  WaitForMetric(*server_, "rapt_open_streams", 0);
}

TEST(LinearStreamEndTest, TheDeadlineOfTheCallerEndsIt) {
  const ServerProcess server;
  const auto stub = Connect(server.grpc_address());
  Caller caller(*stub, seconds(1));
  Response response;
  ASSERT_TRUE(caller.Exchange(GatedDelta()[0], response));
  EXPECT_FALSE(caller.Read(response));
  EXPECT_EQ(caller.Finish().error_code(), StatusCode::DEADLINE_EXCEEDED);
  WaitUntilNothingIsHeld(server);
}

TEST(LinearStreamEndTest, ASilentCallerIsEnded) {
  const ServerProcess server({"--default_deadline=1s"});
  const auto stub = Connect(server.grpc_address());
  Caller caller(*stub);
  Response response;
  ASSERT_TRUE(caller.Exchange(GatedDelta()[0], response));
  EXPECT_FALSE(caller.Read(response));
  const grpc::Status status = caller.Finish();
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED);
  EXPECT_EQ(status.error_message(), "no message arrived for 1s, while the stream held its state");
  WaitUntilNothingIsHeld(server);
  EXPECT_EQ(ReadMetric(server, "rapt_rejected_total", {{"reason", "slow_sender"}}), 1);
}

TEST(LinearStreamEndTest, ACallerThatDoesNotReadIsEnded) {
  const ServerProcess server({"--default_deadline=1s"});
  const auto stub = Connect(server.grpc_address());
  Rng rng(7);
  Request request = Tokens(20000, rng);  // 4 MB of output
  SetHeads(request);
  Caller caller(*stub, std::chrono::hours(1));
  ASSERT_TRUE(caller.Write(request));
  request.clear_q_num_heads(), request.clear_kv_num_heads();
  ASSERT_TRUE(caller.Write(request));  // gRPC's client takes one response before it is read
  WaitForMetric(
      server, "rapt_requests_total", 1,
      {{"method", "rapt.v1.AttentionService/LinearAttendStream"}, {"code", "DEADLINE_EXCEEDED"}});
  WaitUntilNothingIsHeld(server);
  caller.Cancel();
  EXPECT_FALSE(caller.Finish().ok());
}

// The callers of TCP are one caller, those of the Unix domain socket another.
TEST(LinearStreamEndTest, ASilentCallerGivesWayToOthers) {
  constexpr int64_t kSize = 1024;  // of a state of 4 MiB
  constexpr int kSilent = 12;      // there is no memory for the 9 MiB of one more
  std::string pattern = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
  const std::filesystem::path folder = mkdtemp(pattern.data());
  const std::string socket = folder / "socket";
  {
    const ServerProcess server({absl::StrCat("--memory_budget_bytes=", 128 * kMiB),
                                absl::StrCat("--unix_socket=", socket)});
    Rng rng(4);
    Request request;
    for (v1::Tensor* tensor :
         {request.mutable_query(), request.mutable_key(), request.mutable_value()}) {
      Set(*tensor, {1, 1, kSize}, -1, 1, rng);
    }
    request.set_update_rule(v1::UPDATE_LINEAR);
    request.set_q_num_heads(1);
    request.set_kv_num_heads(1);
    const auto tcp = Connect(server.grpc_address());
    const auto other = Connect(absl::StrCat("unix:", socket));
    std::vector<std::unique_ptr<Caller>> silent;
    Response response;
    while (silent.size() < kSilent) {
      silent.push_back(std::make_unique<Caller>(*tcp));
      ASSERT_TRUE(silent.back()->Exchange(request, response));
    }
    Caller caller(*other);
    EXPECT_TRUE(caller.Exchange(request, response));
    EXPECT_GE(ReadMetric(server, "rapt_rejected_total", {{"reason", "caller_share"}}), 1);
    caller.Cancel();
    for (const auto& one : silent) one->Cancel();
    caller.Finish();
    for (const auto& one : silent) one->Finish();
    WaitUntilNothingIsHeld(server);
  }
  std::filesystem::remove_all(folder);
}

TEST(LinearStreamEndTest, ADrainingServerFinishesStreamsAndAcceptsNone) {
  ServerProcess server({kDrainPause, kDrainRefusalTime});
  const auto stub = Connect(server.grpc_address());
  std::vector<Request> messages = GatedDelta();
  Rng rng(5);
  messages[4] = Tokens(2000, rng);  // waits for its memory, unlike small ones
  Caller caller(*stub);
  Response response;
  ASSERT_TRUE(caller.Exchange(messages[0], response));
  server.Terminate();
  // gRPC's client begins a call that GOAWAY refuses anew, on another connection.
  grpc::ChannelArguments arguments;
  arguments.SetInt(GRPC_ARG_ENABLE_RETRIES, 0);
  arguments.SetInt(GRPC_ARG_USE_LOCAL_SUBCHANNEL_POOL, 1);
  const auto other = v1::AttentionService::NewStub(grpc::CreateCustomChannel(
      server.grpc_address(), grpc::InsecureChannelCredentials(), arguments));
  grpc::Status refused;
  while (refused.ok()) refused = Stream(*other, GatedDelta()).status;
  EXPECT_EQ(refused.error_code(), StatusCode::UNAVAILABLE) << refused.error_message();
  for (size_t n = 1; n < messages.size(); ++n) {
    EXPECT_TRUE(caller.Exchange(messages[n], response));
  }
  caller.HalfClose();
  EXPECT_FALSE(caller.Read(response));
  const grpc::Status status = caller.Finish();
  EXPECT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(server.Wait(), 0);
}

TEST(LinearStreamLengthTest, AMillionTokensTakeTheMemoryOfOneMessage) {
  constexpr int64_t kTokens = 1 << 20, kTokensOfMessage = 1 << 13;
  const ServerProcess server({absl::StrCat("--memory_budget_bytes=", 256 * kMiB), "--threads=2"});
  const auto stub = Connect(server.grpc_address());
  Rng rng(6);
  Request message = Tokens(kTokensOfMessage, rng);
  Request first = message;
  SetHeads(first);
  const int64_t before = RssAnonBytes(server.pid());
  int64_t peak;
  {
    const MemoryWatch watch(server.pid());
    Caller caller(*stub);
    Response response;
    for (int64_t begin = 0; begin < kTokens; begin += kTokensOfMessage) {
      ASSERT_TRUE(caller.Exchange(begin == 0 ? first : message, response));
      ASSERT_EQ(response.output().shape(1), kTokensOfMessage);
    }
    caller.HalfClose();
    EXPECT_FALSE(caller.Read(response));
    const grpc::Status status = caller.Finish();
    EXPECT_TRUE(status.ok()) << status.error_message();
    peak = watch.peak();
  }
  std::printf("RssAnon %ld MiB before, %ld MiB at most\n", before / kMiB, peak / kMiB);
  EXPECT_LE(kRssIsMeaningful ? peak - before : 0, 32 * kMiB);
  WaitUntilNothingIsHeld(server);
}

}  // namespace
}  // namespace rapt::test
