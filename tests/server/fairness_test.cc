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

}  // namespace
}  // namespace rapt::test
