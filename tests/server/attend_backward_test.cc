// How AttendBackward and the model attention_backward end, and what the server reports of them.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "tests/support/metrics_page.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using grpc::StatusCode;
using inference::ModelInferRequest;
using ::testing::HasSubstr;

constexpr char kMethod[] = "rapt.v1.AttentionService/AttendBackward";

template <typename Service>
std::unique_ptr<typename Service::Stub> Connect(const ServerProcess& server) {
  return Service::NewStub(
      grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
}

v1::Tensor Zeros(const std::vector<int64_t>& shape) {
  v1::Tensor tensor;
  tensor.set_dtype(v1::FP32);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  int64_t count = 1;
  for (const int64_t axis : shape) count *= axis;
  tensor.set_data(std::string(static_cast<size_t>(count) * sizeof(float), '\0'));
  return tensor;
}

v1::AttendBackwardRequest BackwardOf(const std::vector<int64_t>& shape) {
  v1::AttendBackwardRequest request;
  v1::AttendRequest& call = *request.mutable_call();
  for (v1::Tensor* tensor :
       {call.mutable_q(), call.mutable_k(), call.mutable_v(), request.mutable_dy()}) {
    *tensor = Zeros(shape);
  }
  return request;
}

// Each takes minutes, in many tasks, and a hundred megabytes of messages and results.
v1::AttendBackwardRequest LongBackward() { return BackwardOf({1, 4, 32768, 32}); }

TEST(AttendBackwardEndTest, ACancelledCallEndsOnTheServer) {
  const ServerProcess server({"--threads=2"});
  const auto stub = Connect<v1::AttentionService>(server);
  grpc::ClientContext context;
  v1::AttendBackwardResponse response;
  std::future<grpc::Status> status = std::async(std::launch::async, [&] {
    return stub->AttendBackward(&context, LongBackward(), &response);
  });
  WaitUntilComputing(server);
  context.TryCancel();
  EXPECT_EQ(status.get().error_code(), StatusCode::CANCELLED);
  WaitForMetric(server, "rapt_requests_total", 1, {{"code", "CANCELLED"}, {"method", kMethod}});
  WaitUntilNothingIsHeld(server);
}

TEST(AttendBackwardEndTest, ADeadlineEndsACall) {
  const ServerProcess server({"--threads=2"});
  const auto stub = Connect<v1::AttentionService>(server);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  v1::AttendBackwardResponse response;
  EXPECT_EQ(stub->AttendBackward(&context, LongBackward(), &response).error_code(),
            StatusCode::DEADLINE_EXCEEDED);
  WaitForMetric(server, "rapt_open_calls", 0);
  WaitUntilNothingIsHeld(server);
}

// The message fits the budget; the gradients and the workspace do not.
TEST(AttendBackwardEndTest, RejectsWhatNeedsMoreThanTheBudget) {
  const ServerProcess server(
      {"--memory_budget_bytes=900000", "--max_message_bytes=390000", "--threads=2"});
  const auto stub = Connect<v1::AttentionService>(server);
  grpc::ClientContext context;
  v1::AttendBackwardResponse response;
  const grpc::Status status =
      stub->AttendBackward(&context, BackwardOf({1, 1, 220, 100}), &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("the memory for outputs and workspace needs "));
  EXPECT_THAT(status.error_message(), HasSubstr("at most 393750 of the memory budget"));
  WaitUntilNothingIsHeld(server);
}

TEST(AttendBackwardTest, TheReferenceBackendReturnsGradients) {
  const ServerProcess server({"--backend=reference"});
  v1::AttendBackwardRequest request = BackwardOf({1, 1, 2, 1});
  const float ones[] = {1, 1};
  request.mutable_dy()->set_data(ones, sizeof ones);
  grpc::ClientContext context;
  v1::AttendBackwardResponse response;
  const grpc::Status status =
      Connect<v1::AttentionService>(server)->AttendBackward(&context, request, &response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.backend(), "reference");
  // Both queries weigh both keys with 1/2.
  EXPECT_EQ(response.dv().data(), request.dy().data());
  EXPECT_EQ(response.dq().data(), request.call().q().data());
}

// operator_calls_test compares the gradients with those of the operator.
TEST(AttendBackwardReportTest, BothProtocolsAreCountedAndNameBackendAndPlan) {
  const ServerProcess server({"--threads=2"});
  const v1::AttendBackwardRequest native = BackwardOf({1, 2, 3, 4});
  grpc::ClientContext context;
  v1::AttendBackwardResponse response;
  ASSERT_TRUE(
      Connect<v1::AttentionService>(server)->AttendBackward(&context, native, &response).ok());
  std::map<std::string, std::string> trailers;
  for (const auto& [key, value] : context.GetServerTrailingMetadata()) {
    trailers[std::string(key.data(), key.size())] = std::string(value.data(), value.size());
  }
  EXPECT_EQ(response.backend(), "cpu");
  EXPECT_EQ(trailers["rapt-backend"], response.backend());
  EXPECT_EQ(trailers["rapt-plan"], response.plan());
  EXPECT_TRUE(response.has_timing());

  ModelInferRequest request;
  request.set_model_name("attention_backward");
  for (const char* name : {"Q", "K", "V", "dY"}) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    *input.mutable_shape() = native.dy().shape();
    request.add_raw_input_contents(native.dy().data());
  }
  const auto stub = Connect<inference::GRPCInferenceService>(server);
  grpc::ClientContext infer_context;
  inference::ModelInferResponse answer;
  const grpc::Status status = stub->ModelInfer(&infer_context, request, &answer);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(answer.model_name(), "attention_backward");

  WaitForMetric(server, "rapt_model_requests_total", 2, {{"model", "attention_backward"}});
  EXPECT_EQ(ReadMetric(server, "rapt_model_requests_total", {{"model", "attention"}}), 0);
  EXPECT_EQ(ReadMetric(server, "rapt_variant_requests_total", {{"variant", "backward"}}), 2);
  EXPECT_EQ(ReadMetric(server, "rapt_variant_requests_total", {{"variant", "plain"}}), 0);
  EXPECT_EQ(ReadMetric(server, "rapt_requests_total", {{"method", kMethod}, {"code", "OK"}}), 1);
  grpc::ClientContext statistics_context;
  inference::ModelStatisticsRequest statistics_request;
  statistics_request.set_name("attention_backward");
  inference::ModelStatisticsResponse statistics;
  ASSERT_TRUE(stub->ModelStatistics(&statistics_context, statistics_request, &statistics).ok());
  ASSERT_EQ(statistics.model_stats_size(), 1);
  EXPECT_EQ(statistics.model_stats(0).inference_stats().success().count(), 1u);
}

TEST(AttentionBackwardModelTest, DescribesItsTensors) {
  const ServerProcess server;
  const auto stub = Connect<inference::GRPCInferenceService>(server);
  grpc::ClientContext context;
  inference::ModelConfigRequest request;
  request.set_name("attention_backward");
  inference::ModelConfigResponse response;
  ASSERT_TRUE(stub->ModelConfig(&context, request, &response).ok());
  std::map<std::string, bool> optional;
  for (const auto& input : response.config().input()) optional[input.name()] = input.optional();
  for (const char* name : {"Q", "K", "dY"}) EXPECT_FALSE(optional.at(name)) << name;
  for (const char* name : {"Y", "lse", "dlse", "attn_mask"}) EXPECT_TRUE(optional.at(name)) << name;
  std::map<std::string, inference::DataType> outputs;
  for (const auto& output : response.config().output()) {
    outputs[output.name()] = output.data_type();
  }
  for (const char* name : {"dQ", "dK", "dV", "d_attn_mask", "d_head_sink"}) {
    EXPECT_EQ(outputs[name], inference::TYPE_FP32) << name;
  }
  EXPECT_EQ(outputs.count("d_bias_table"), 0u) << "as its input";
}

}  // namespace
}  // namespace rapt::test
