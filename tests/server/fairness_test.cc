// The built server with a caller that takes more than its share of the memory.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>
#include <stdlib.h>

#include <chrono>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "tests/support/metrics_page.h"
#include "tests/support/raw_call.h"
#include "tests/support/raw_http.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using inference::GRPCInferenceService;

constexpr char kInferPath[] = "/inference.GRPCInferenceService/ModelInfer";

// Too large for the memory that is kept for small requests: 4 MiB.
inference::ModelInferRequest LargeRequest() {
  inference::ModelInferRequest request;
  request.set_model_name("attention");
  for (const auto& [name, length] :
       {std::pair("Q", 1), std::pair("K", 8192), std::pair("V", 8192)}) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {1, 1, length, 64}) input.add_shape(axis);
    const std::vector<float> values(static_cast<size_t>(length) * 64, 1);
    request.add_raw_input_contents(values.data(), values.size() * sizeof(float));
  }
  return request;
}

// The callers of TCP are one caller, those of the Unix domain socket another.
TEST(FairnessTest, HeadersWithoutMessagesDelayOtherCallersForABoundedTime) {
  constexpr int kSilent = 30, kCalls = 3;
  constexpr uint32_t kMessageBytes = 56 << 20;
  std::string pattern = std::filesystem::temp_directory_path() / "rapt-XXXXXX";
  const std::filesystem::path folder = mkdtemp(pattern.data());
  const std::string socket = folder / "socket";
  {
    const ServerProcess server({"--memory_budget_bytes=268435456",
                                absl::StrCat("--max_message_bytes=", kMessageBytes),
                                absl::StrCat("--unix_socket=", socket)});
    std::vector<std::unique_ptr<RawCall>> silent;
    for (int n = 0; n < kSilent; ++n) {
      silent.push_back(
          std::make_unique<RawCall>(server.grpc_address(), kInferPath,
                                    std::map<std::string, std::string>{{"grpc-timeout", "1H"}}));
      // Nothing is reserved for headers alone.
      silent.back()->SendPart(kMessageBytes, 0);
    }
    WaitForMetric(server, "rapt_open_calls", kSilent);
    // Each reserves as much, of which two fit.
    WaitForMetric(server, "rapt_queue_depth", kSilent - 2, {{"queue", "memory"}});
    const auto stub = GRPCInferenceService::NewStub(
        grpc::CreateChannel(absl::StrCat("unix:", socket), grpc::InsecureChannelCredentials()));
    for (int n = 0; n < kCalls; ++n) {
      grpc::ClientContext context;
      inference::ModelInferResponse response;
      const grpc::Status status = stub->ModelInfer(&context, LargeRequest(), &response);
      EXPECT_TRUE(status.ok()) << status.error_message();
    }
    EXPECT_GE(ReadMetric(server, "rapt_rejected_total", {{"reason", "caller_share"}}), 1);
    silent.clear();
    WaitUntilNothingIsHeld(server);
  }
  std::filesystem::remove_all(folder);
}

// --- Callers by address --------------------------------------------------------------------------

constexpr char kGreedy[] = "127.0.0.1", kOther[] = "127.0.0.2";
constexpr char kBudget[] = "--memory_budget_bytes=268435456";  // 112 MiB of each share, and 16 for
                                                               // requests of at most 4 MiB
constexpr char kPost[] = "POST /v2/models/attention/infer HTTP/1.1\r\nHost: localhost\r\n";

// Asks for all weights, 4 * length^2 bytes.
std::string WeightsRequest(size_t length) {
  const std::vector<float> values(length, 1);
  const size_t bytes = length * sizeof(float);
  std::string inputs, body;
  for (const char* name : {"Q", "K", "V"}) {
    absl::StrAppend(&inputs, inputs.empty() ? "" : ",", R"({"name":")", name,
                    R"(","datatype":"FP32","shape":[1,1,)", length,
                    R"(,1],"parameters":{"binary_data_size":)", bytes, "}}");
    body.append(reinterpret_cast<const char*>(values.data()), bytes);
  }
  const std::string head =
      absl::StrCat(R"({"inputs":[)", inputs, R"(],"parameters":{"qk_matmul_output_mode":3},)",
                   R"("outputs":[{"name":"qk_matmul_output","parameters":{"binary_data":true}}]})");
  return absl::StrCat(kPost, "Inference-Header-Content-Length: ", head.size(),
                      "\r\nContent-Length: ", head.size() + body.size(), "\r\n\r\n", head, body);
}

int64_t EndedForOthers(const ServerProcess& server) {
  return ReadMetric(server, "rapt_rejected_total", {{"reason", "caller_share"}});
}

void WaitUntilHeld(const ServerProcess& server, const char* kind, double bytes) {
  WaitForPage(server, absl::StrCat(bytes, " reserved bytes"), [&](const std::string& page) {
    return SumOnPage(page, "rapt_memory_reserved_bytes", {{"kind", kind}}) >= bytes;
  });
}

// Bodies of one address fill the memory of messages to the last byte that it can get, and stay.
TEST(FairnessTest, SmallCallsOfOthersNeedNoMemoryOfACallerThatTakesAllOfIt) {
  const ServerProcess server({kBudget, "--min_receive_bytes_per_second=1"});
  std::vector<std::unique_ptr<RawHttp>> uploads;
  const auto upload = [&](const std::string& framing) {
    uploads.push_back(std::make_unique<RawHttp>(server.http_address(), kGreedy));
    uploads.back()->Send(absl::StrCat(kPost, framing, "\r\n\r\n"));
  };
  for (int n = 0; n < 150; ++n) {
    upload("Transfer-Encoding: chunked");
    uploads.back()->Send("1\r\n{\r\n");
  }
  for (int64_t bytes = 1 << 20; bytes > 100; bytes /= 2) {
    upload(absl::StrCat("Content-Length: ", bytes));
  }
  WaitForMetric(server, "rapt_open_calls", static_cast<double>(uploads.size()));
  WaitUntilHeld(server, "receive", 119 << 20);
  RawHttp other(server.http_address(), kOther);
  for (int n = 0; n < 20; ++n) EXPECT_EQ(other.Ask(WeightsRequest(16)).status, 200);
  EXPECT_EQ(EndedForOthers(server), 0) << "nothing had to end for them";
  uploads.clear();
  WaitUntilNothingIsHeld(server);
}

TEST(FairnessTest, AnOnlyCallThatIsNotReadGivesWay) {
  const ServerProcess server({kBudget});
  const RawHttp unread(server.http_address(), kGreedy);
  unread.Send(WeightsRequest(5200));  // 103 MiB
  WaitUntilHeld(server, "compute", 100 << 20);
  RawHttp other(server.http_address(), kOther);
  EXPECT_EQ(other.Ask(WeightsRequest(2000)).status, 200);  // 15 MiB
  EXPECT_EQ(EndedForOthers(server), 1);
  WaitUntilNothingIsHeld(server);
}

TEST(FairnessTest, AnOnlyCallThatSendsNothingGivesWay) {
  constexpr uint32_t kMessageBytes = 111 << 20;
  for (const bool over_grpc : {true, false}) {
    const ServerProcess server({kBudget, absl::StrCat("--max_message_bytes=", kMessageBytes)});
    std::unique_ptr<RawCall> call;
    std::unique_ptr<RawHttp> body;
    const auto post = [](size_t bytes) {
      return absl::StrCat(kPost, "Inference-Header-Content-Length: 2\r\nContent-Length: ", bytes,
                          "\r\n\r\n{}");
    };
    if (over_grpc) {
      call = std::make_unique<RawCall>(server.grpc_address(), kInferPath);
      call->SendPart(kMessageBytes, 1000);
    } else {
      body = std::make_unique<RawHttp>(server.http_address(), kGreedy);
      body->Send(post(kMessageBytes));
    }
    WaitUntilHeld(server, "receive", kMessageBytes);
    RawHttp other(server.http_address(), kOther);
    const std::string rest(5 << 20, ' ');
    EXPECT_EQ(other.Ask(post(rest.size() + 2) + rest).status, 400) << "it is read";
    EXPECT_EQ(EndedForOthers(server), 1);
    call.reset();
    body.reset();
    WaitUntilNothingIsHeld(server);
  }
}

}  // namespace
}  // namespace rapt::test
