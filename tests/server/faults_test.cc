// The faults listed in docs/operations.md: the server returns a clear status for each, holds
// nothing afterwards, and serves other callers meanwhile.
#include <gmock/gmock.h>
#include <grpcpp/generic/generic_stub.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdint>
#include <cstring>
#include <future>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/inference/grpc_service.pb.h"
#include "proto/rapt/v1/attention.pb.h"
#include "rapt/client.h"
#include "tests/support/callers.h"
#include "tests/support/corrupt.h"
#include "tests/support/loopback.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_call.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using client::AttendResult;
using client::Client;
using client::DType;
using client::TensorView;
using grpc::StatusCode;
using std::chrono::milliseconds;

constexpr char kInferPath[] = "/inference.GRPCInferenceService/ModelInfer";
constexpr char kStreamPath[] = "/inference.GRPCInferenceService/ModelStreamInfer";
constexpr char kRestPath[] = "/v2/models/attention/infer";
constexpr char kAttendPath[] = "/rapt.v1.AttentionService/Attend";
constexpr int64_t kMiB = 1 << 20;

std::unique_ptr<Client> ConnectClient(const ServerProcess& server,
                                      const client::Options& options = {}) {
  auto client = Client::Connect(server.grpc_address(), options);
  EXPECT_TRUE(client.ok()) << client.status();
  return client.ok() ? *std::move(client) : nullptr;
}

// Computes self-attention over tensors of 0.5, whose result is 0.5 everywhere.
absl::Status AttendAndCheck(Client& client, const client::CallOptions& options = {}) {
  const std::vector<float> x(2 * 8 * 4, 0.5f);
  const TensorView tokens = client::View<float>({1, 2, 8, 4}, x);
  const absl::StatusOr<AttendResult> result =
      client.Attend({.q = tokens, .k = tokens, .v = tokens}, options);
  if (!result.ok()) return result.status();
  for (const float y : result->y.values<float>()) {
    if (y != 0.5f) return absl::InternalError(absl::StrCat("expected a mean of 0.5, got ", y));
  }
  return absl::OkStatus();
}

void ExpectCorrectResults(const ServerProcess& server, int calls) {
  const std::unique_ptr<Client> client = ConnectClient(server);
  ASSERT_NE(client, nullptr);
  for (int n = 0; n < calls; ++n) EXPECT_EQ(AttendAndCheck(*client), absl::OkStatus());
}

// `length` queries and keys of one element; requests all weights.
inference::ModelInferRequest WeightsRequest(int64_t length) {
  inference::ModelInferRequest request;
  request.set_model_name("attention");
  const std::vector<float> values(length, 1);
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {int64_t{1}, int64_t{1}, length, int64_t{1}}) input.add_shape(axis);
    request.add_raw_input_contents(values.data(), values.size() * sizeof(float));
  }
  request.add_outputs()->set_name("qk_matmul_output");
  return request;
}

// The same in JSON.
std::string WeightsJson(int64_t length) {
  std::string inputs;
  for (const char* name : {"Q", "K", "V"}) {
    absl::StrAppend(&inputs, inputs.empty() ? "" : ",", R"({"name":")", name,
                    R"(","datatype":"FP32","shape":[1,1,)", length, R"(,1],"data":[1)");
    for (int64_t n = 1; n < length; ++n) inputs += ",1";
    inputs += "]}";
  }
  return absl::StrCat(R"({"inputs":[)", inputs, R"(],"outputs":[{"name":"qk_matmul_output"}]})");
}

// Blocks until this number of calls has arrived, some of which may have ended.
void WaitForCalls(const ServerProcess& server, int count) {
  WaitForPage(server, absl::StrCat(count, " calls"), [count](const std::string& page) {
    return SumOnPage(page, "rapt_open_calls") +
               std::max(SumOnPage(page, "rapt_requests_total", {{"method", kInferPath + 1}}), 0.) >=
           count;
  });
}

// --- Slow callers --------------------------------------------------------------------------------

TEST(FaultsTest, SlowReadersAreEvictedAtTheDeadlineAndDelayNobody) {
  constexpr int kReaders = 8;
  const ServerProcess server({"--default_deadline=3s", "--threads=1"});
  const std::string request = WeightsRequest(1000).SerializeAsString();  // 4 MB of weights
  std::vector<std::unique_ptr<RawCall>> readers;
  for (int n = 0; n < kReaders; ++n) {
    readers.push_back(std::make_unique<RawCall>(server.grpc_address(), kInferPath));
    readers.back()->SendMessage(request);  // reads nothing: only 64 KiB of the response can be sent
  }
  WaitForCalls(server, kReaders);
  ExpectCorrectResults(server, 20);
  WaitUntilNothingIsHeld(server);
  EXPECT_EQ(ReadMetric(server, "rapt_deadline_exceeded_total"), kReaders);
  EXPECT_GT(ReadMetric(server, "rapt_deadline_exceeded_total", {{"phase", "send"}}), 0);
}

// A long deadline does not let a caller hold memory.
TEST(FaultsTest, SlowReadersAreEvictedBeforeTheirDeadline) {
  const ServerProcess server({"--min_receive_bytes_per_second=10000000"});
  const std::string request = WeightsRequest(1000).SerializeAsString();  // 4 MB of weights
  RawCall alone(server.grpc_address(), kInferPath, {{"grpc-timeout", "1H"}});
  alone.SendMessage(request);
  RawCall stream(server.grpc_address(), kStreamPath, {{"grpc-timeout", "1H"}});
  stream.SendMessage(request);
  WaitForMetric(server, "rapt_rejected_total", 2, {{"reason", "slow_reader"}});
  WaitUntilNothingIsHeld(server);
  for (const char* path : {kInferPath, kStreamPath}) {
    EXPECT_EQ(ReadMetric(server, "rapt_requests_total",
                         {{"method", path + 1}, {"code", "RESOURCE_EXHAUSTED"}}),
              1)
        << path;
  }
}

TEST(FaultsTest, SlowSendersAreEvictedAndDoNotBlockSmallCalls) {
  constexpr int kWriters = 6;  // more than the budget has room for
  const ServerProcess server({absl::StrCat("--memory_budget_bytes=", 256 * kMiB),
                              "--min_receive_bytes_per_second=67108864"});
  std::vector<std::unique_ptr<RawCall>> writers;
  for (int n = 0; n < kWriters; ++n) {
    writers.push_back(std::make_unique<RawCall>(server.grpc_address(), kInferPath));
    writers.back()->SendPart(24 * kMiB, 60'000);
  }
  WaitForCalls(server, kWriters);
  ExpectCorrectResults(server, 20);
  for (const auto& writer : writers) {
    EXPECT_EQ(writer->WaitForStatus(), StatusCode::RESOURCE_EXHAUSTED);
  }
  EXPECT_GT(ReadMetric(server, "rapt_rejected_total", {{"reason", "slow_sender"}}), 0);
  WaitUntilNothingIsHeld(server);
}

// --- Garbage -------------------------------------------------------------------------------------

TEST(FaultsTest, CorruptConnectionsLeaveNothingBehind) {
  const ServerProcess server({"--default_deadline=2s"});
  const std::string conversation = OpeningBytes(server.grpc_address(), kInferPath) +
                                   MessageBytes(WeightsRequest(8).SerializeAsString());
  std::mt19937 random(7);
  for (int n = 0; n < 300; ++n) Exchange(server.grpc_address(), Corrupt(conversation, random));
  for (int n = 0; n < 30; ++n) {
    std::string noise(random() % 4096, '\0');
    for (char& byte : noise) byte = static_cast<char>(random());
    Exchange(server.grpc_address(), noise);
    Exchange(server.metrics_address(), noise);
    Exchange(server.http_address(), noise);
  }
  const std::string request = RequestText("POST", kRestPath, WeightsJson(8));
  for (int n = 0; n < 300; ++n) Exchange(server.http_address(), Corrupt(request, random));
  WaitUntilNothingIsHeld(server);
  ExpectCorrectResults(server, 5);
}

TEST(FaultsTest, CorruptBodiesGetAClearError) {
  const ServerProcess server;
  std::mt19937 random(13);
  const std::string body = WeightsJson(8);
  const auto ask = [&server](const std::string& bytes) {
    return RawHttp(server.http_address()).Ask(RequestText("POST", kRestPath, bytes));
  };
  EXPECT_EQ(ask(body).status, 200);
  for (int n = 0; n < 500; ++n) {
    const RawResponse response = ask(Corrupt(body, random));
    EXPECT_THAT(response.status, ::testing::AnyOf(200, 400, 413, 501)) << n << response.body;
    EXPECT_EQ(response.status == 200, !absl::StartsWith(response.body, "{\"error\":\"")) << n;
  }
  const std::string log = server.Log();
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1)
      << "garbage must not fill the log: " << log;
  WaitUntilNothingIsHeld(server);
}

// Makes one call with these bytes as its message. Returns its status.
grpc::Status SendBytes(grpc::GenericStub& stub, const char* path, const std::string& message) {
  grpc::Slice slice(message);
  grpc::ByteBuffer bytes(&slice, 1), answer;
  grpc::ClientContext context;
  std::promise<grpc::Status> status;
  stub.UnaryCall(&context, path, grpc::StubOptions(), &bytes, &answer,
                 [&status](grpc::Status s) { status.set_value(std::move(s)); });
  return status.get_future().get();
}

TEST(FaultsTest, CorruptMessagesGetAClearError) {
  const ServerProcess server;
  rapt::v1::AttendRequest attend;
  for (rapt::v1::Tensor* tensor : {attend.mutable_q(), attend.mutable_k(), attend.mutable_v()}) {
    tensor->set_dtype(rapt::v1::FP32);
    for (const int64_t axis : {1, 1, 4, 4}) tensor->add_shape(axis);
    tensor->set_data(std::string(64, '\0'));
  }
  const std::pair<const char*, std::string> messages[] = {
      {kInferPath, WeightsRequest(8).SerializeAsString()},
      {kAttendPath, attend.SerializeAsString()}};
  grpc::GenericStub stub(
      grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
  std::mt19937 random(11);
  for (const auto& [path, message] : messages) {
    EXPECT_TRUE(SendBytes(stub, path, message).ok());
    for (int n = 0; n < 500; ++n) {
      const std::string spoiled = Corrupt(message, random);
      const grpc::Status status = SendBytes(stub, path, spoiled);
      EXPECT_THAT(
          status.error_code(),
          ::testing::AnyOf(StatusCode::OK, StatusCode::INVALID_ARGUMENT, StatusCode::NOT_FOUND,
                           StatusCode::UNIMPLEMENTED, StatusCode::RESOURCE_EXHAUSTED))
          << path << " " << n << ": " << status.error_message();
      EXPECT_EQ(status.ok(), status.error_message().empty());
    }
  }
  inference::ModelInferRequest no_text = WeightsRequest(8);
  no_text.set_id(std::string(1, '\xFF'));  // not UTF-8
  EXPECT_EQ(SendBytes(stub, kInferPath, no_text.SerializePartialAsString()).error_code(),
            StatusCode::INVALID_ARGUMENT);
  const std::string log = server.Log();
  EXPECT_EQ(std::count(log.begin(), log.end(), '\n'), 1)
      << "garbage must not fill the log: " << log;
  WaitUntilNothingIsHeld(server);
}

// --- NaN -----------------------------------------------------------------------------------------

// Compares the bits of each element, without the sign, with those of infinity: larger ones are NaN.
bool AreAllNan(const client::Tensor& tensor) {
  const auto all_above = [&tensor](auto infinity, auto sign) {
    decltype(infinity) bits;
    for (size_t at = 0; at < tensor.bytes().size(); at += sizeof(bits)) {
      std::memcpy(&bits, tensor.bytes().data() + at, sizeof(bits));
      if ((bits & ~sign) <= infinity) return false;
    }
    return !tensor.bytes().empty();
  };
  switch (tensor.dtype()) {
    case DType::kFloat16:
      return all_above(uint16_t{0x7C00}, uint16_t{0x8000});
    case DType::kBFloat16:
      return all_above(uint16_t{0x7F80}, uint16_t{0x8000});
    case DType::kFloat64:
      return all_above(uint64_t{0x7FF0000000000000}, uint64_t{0x8000000000000000});
    default:
      return all_above(uint32_t{0x7F800000}, uint32_t{0x80000000});
  }
}

TEST(FaultsTest, NanInputsAreComputedAndDoNotAffectLaterCalls) {
  const ServerProcess server({"--threads=2"});
  const std::unique_ptr<Client> client = ConnectClient(server);
  ASSERT_NE(client, nullptr);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    for (const int64_t length : {3, 300}) {  // inline, and on all compute threads
      const client::Shape shape = {1, 2, length, 64};
      const auto size = static_cast<size_t>(2 * length * 64 * client::SizeOf(dtype));
      const std::vector<std::byte> clean(size, std::byte{0x38});  // a finite number in every type
      const std::vector<std::byte> nan(size, std::byte{0xFF});
      const auto attend = [&](const std::vector<std::byte>& bytes) {
        const TensorView x = {dtype, shape, bytes};
        const absl::StatusOr<AttendResult> result =
            client->Attend({.q = x, .k = x, .v = x, .wants_lse = true});
        EXPECT_TRUE(result.ok()) << result.status();
        return result.ok() ? *result : AttendResult();
      };
      const AttendResult before = attend(clean);
      EXPECT_FALSE(AreAllNan(before.y));
      const AttendResult poisoned = attend(nan);
      EXPECT_TRUE(AreAllNan(poisoned.y)) << client::NameOf(dtype) << " " << length;
      EXPECT_TRUE(AreAllNan(*poisoned.lse)) << client::NameOf(dtype) << " " << length;
      EXPECT_EQ(attend(clean).y.bytes(), before.y.bytes()) << client::NameOf(dtype);
    }
  }
  WaitUntilNothingIsHeld(server);
}

// --- Restarts ------------------------------------------------------------------------------------

class RestartTest : public ::testing::TestWithParam<int> {};

TEST_P(RestartTest, ClientsThatRetryLoseNoCall) {
  constexpr int kCallers = 4, kRestarts = 3;
  auto server = std::make_unique<ServerProcess>();
  const std::string address = server->grpc_address();
  const std::unique_ptr<Client> client = ConnectClient(
      *server, {.retries = {.max_attempts = 1'000'000, .max_backoff = milliseconds(100)}});
  ASSERT_NE(client, nullptr);
  Callers callers(
      kCallers, [&client] { return AttendAndCheck(*client, {.timeout = std::chrono::hours(1)}); });
  for (int n = 0; n < kRestarts; ++n) {
    callers.WaitForMore(50);
    server->Signal(GetParam());
    EXPECT_EQ(server->Wait(), GetParam() == SIGKILL ? -SIGKILL : 0);
    server = std::make_unique<ServerProcess>(
        std::vector<std::string>{absl::StrCat("--grpc_address=", address)});
  }
  callers.WaitForMore(50);
  EXPECT_EQ(callers.Stop(), absl::OkStatus());
}

INSTANTIATE_TEST_SUITE_P(, RestartTest, ::testing::Values(SIGKILL, SIGTERM), [](const auto& info) {
  return std::string(info.param == SIGKILL ? "Killed" : "Terminated");
});

}  // namespace
}  // namespace rapt::test
