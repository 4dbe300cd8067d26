// Shared memory of the real rapt-server, with well-behaved and misbehaving owners.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "proto/inference/grpc_service.grpc.pb.h"
#include "tests/support/server_process.h"
#include "tests/support/shared_object.h"

namespace rapt {
namespace {

using grpc::StatusCode;
using inference::GRPCInferenceService;
using inference::ModelInferRequest;
using inference::ModelInferResponse;
using test::ServerProcess;
using test::Share;
using test::SharedObject;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr int64_t kSize = 64;
constexpr int64_t kShort = 3;    // computed inline
constexpr int64_t kLong = 1024;  // on the compute threads

int64_t TensorBytes(int64_t length) { return length * kSize * int64_t{sizeof(float)}; }

// Over the region's first tensor.
ModelInferRequest SelfAttention(const std::string& region, int64_t length) {
  ModelInferRequest request;
  request.set_model_name("attention");
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = *request.add_inputs();
    input.set_name(name);
    input.set_datatype("FP32");
    for (const int64_t axis : {int64_t{1}, int64_t{1}, length, kSize}) input.add_shape(axis);
    Share(input, region, 0, TensorBytes(length));
  }
  return request;
}

// A server with a budget far smaller than the tensors that it computes.
class SharedMemoryServerTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    server_ = new ServerProcess({"--allow_shared_memory", "--memory_budget_bytes=8388608"});
  }
  static void TearDownTestSuite() { delete server_; }
  void TearDown() override { EXPECT_TRUE(Unregister("").ok()); }

  grpc::Status Register(const std::string& name, const SharedObject& object) {
    inference::SystemSharedMemoryRegisterRequest request;
    request.set_name(name);
    request.set_key(object.key());
    request.set_byte_size(static_cast<uint64_t>(object.size()));
    inference::SystemSharedMemoryRegisterResponse response;
    grpc::ClientContext context;
    return stub_->SystemSharedMemoryRegister(&context, request, &response);
  }

  grpc::Status Unregister(const std::string& name) {
    inference::SystemSharedMemoryUnregisterRequest request;
    request.set_name(name);
    inference::SystemSharedMemoryUnregisterResponse response;
    grpc::ClientContext context;
    return stub_->SystemSharedMemoryUnregister(&context, request, &response);
  }

  // Self-attention over the first tensor of the region "in", into the beginning of the region
  // "out".
  grpc::Status Attend(int64_t length) {
    ModelInferRequest request = SelfAttention("in", length);
    auto& output = *request.add_outputs();
    output.set_name("Y");
    Share(output, "out", 0, TensorBytes(length));
    grpc::ClientContext context;
    return stub_->ModelInfer(&context, request, &response_);
  }

  const std::unique_ptr<GRPCInferenceService::Stub> stub_ = GRPCInferenceService::NewStub(
      grpc::CreateChannel(server_->grpc_address(), grpc::InsecureChannelCredentials()));
  ModelInferResponse response_;

  static ServerProcess* server_;
};

ServerProcess* SharedMemoryServerTest::server_ = nullptr;

TEST_F(SharedMemoryServerTest, ComputesMoreThanItsBudgetCouldHold) {
  constexpr int64_t kTensorLength = 128 * 1024;  // 32 MiB, four times the budget
  const SharedObject in(TensorBytes(kTensorLength)), out(TensorBytes(kTensorLength));
  ASSERT_TRUE(Register("in", in).ok());
  ASSERT_TRUE(Register("out", out).ok());
  const absl::Span<float> values = in.Values<float>(0, kTensorLength * kSize);
  std::fill(values.begin(), values.end(), 0.25f);  // equal values: any mean of them is the same
  ModelInferRequest request = SelfAttention("in", kTensorLength);
  (*request.mutable_parameters())["left_window_size"].set_int64_param(4);
  (*request.mutable_parameters())["right_window_size"].set_int64_param(4);
  auto& output = *request.add_outputs();
  output.set_name("Y");
  Share(output, "out", 0, TensorBytes(kTensorLength));
  grpc::ClientContext context;
  const grpc::Status status = stub_->ModelInfer(&context, request, &response_);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response_.raw_output_contents(0), "");
  const absl::Span<float> y = out.Values<float>(0, kTensorLength * kSize);
  const auto wrong =
      std::find_if(y.begin(), y.end(), [](float value) { return std::abs(value - 0.25f) > 1e-6f; });
  EXPECT_EQ(wrong, y.end()) << "element " << wrong - y.begin() << " is " << *wrong;
}

// Which object is truncated, and where the server accesses it.
struct Cut {
  const char* name;
  bool output;
  int64_t length;
};

class CutMemoryTest : public SharedMemoryServerTest, public ::testing::WithParamInterface<Cut> {};

TEST_P(CutMemoryTest, FailsThatRequestAndNothingElse) {
  const Cut& p = GetParam();
  SharedObject in(TensorBytes(p.length)), out(TensorBytes(p.length));
  ASSERT_TRUE(Register("in", in).ok());
  ASSERT_TRUE(Register("out", out).ok());
  ASSERT_TRUE(Attend(p.length).ok());
  (p.output ? out : in).Truncate(0);

  const grpc::Status cut = Attend(p.length);
  EXPECT_EQ(cut.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(cut.error_message(), HasSubstr("the owner truncated"));
  const grpc::Status again = Attend(p.length);
  EXPECT_THAT(again.error_message(), HasSubstr(p.output ? "'out'" : "'in'"));

  const SharedObject fresh(TensorBytes(p.length));
  const std::string name = p.output ? "out" : "in";
  ASSERT_TRUE(Unregister(name).ok());
  ASSERT_TRUE(Register(name, fresh).ok());
  const grpc::Status healed = Attend(p.length);
  EXPECT_TRUE(healed.ok()) << healed.error_message();
}

INSTANTIATE_TEST_SUITE_P(All, CutMemoryTest,
                         ::testing::Values(Cut{"InputOnTheCallsThread", false, kShort},
                                           Cut{"InputOnComputeThreads", false, kLong},
                                           Cut{"OutputOnTheCallsThread", true, kShort},
                                           Cut{"OutputOnComputeThreads", true, kLong}),
                         [](const auto& info) { return info.param.name; });

TEST_F(SharedMemoryServerTest, AStreamSurvivesALongNameInItsError) {
  const ModelInferRequest request = SelfAttention(std::string(255, 'a') + "é", 1);
  grpc::ClientContext context;
  const auto stream = stub_->ModelStreamInfer(&context);
  inference::ModelStreamInferResponse response;
  for (int n = 0; n < 2; ++n) {
    EXPECT_TRUE(stream->Write(request));
    EXPECT_TRUE(stream->Read(&response)) << "the error message must be readable";
    EXPECT_THAT(response.error_message(), HasSubstr("aaa'"));
  }
  stream->WritesDone();
  EXPECT_TRUE(stream->Finish().ok());
}

TEST_F(SharedMemoryServerTest, StatusListsRegionsButNoKeys) {
  const SharedObject object(4096);
  ASSERT_TRUE(Register("mine", object).ok());
  inference::SystemSharedMemoryStatusResponse response;
  grpc::ClientContext context;
  ASSERT_TRUE(stub_->SystemSharedMemoryStatus(&context, {}, &response).ok());
  ASSERT_EQ(response.regions().count("mine"), 1u);
  EXPECT_EQ(response.regions().at("mine").byte_size(), 4096u);
  EXPECT_THAT(response.ShortDebugString(), Not(HasSubstr(object.key().substr(1))));
}

TEST_F(SharedMemoryServerTest, OnlyObjectsWithThePrefixCanBeRegistered) {
  const SharedObject object(4096, "other");
  const grpc::Status status = Register("mine", object);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_THAT(status.error_message(), HasSubstr("--shared_memory_prefix"));
  EXPECT_THAT(status.error_message(), Not(HasSubstr("other-")));
}

TEST(SharedMemoryOffTest, IsNotOffered) {
  const ServerProcess server;
  const auto stub = GRPCInferenceService::NewStub(
      grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
  grpc::ClientContext context;
  inference::SystemSharedMemoryStatusResponse response;
  EXPECT_EQ(stub->SystemSharedMemoryStatus(&context, {}, &response).error_code(),
            StatusCode::UNIMPLEMENTED);
  grpc::ClientContext another;
  inference::ServerMetadataResponse metadata;
  ASSERT_TRUE(stub->ServerMetadata(&another, {}, &metadata).ok());
  EXPECT_THAT(metadata.extensions(), Not(::testing::Contains("system_shared_memory")));
}

}  // namespace
}  // namespace rapt
