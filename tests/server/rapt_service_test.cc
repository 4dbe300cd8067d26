// rapt.v1.AttentionService of the real rapt-server, called through gRPC.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "attention/cudnn/cudnn_backend.h"
#include "attention/memory_estimate.h"
#include "base/version.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "tests/support/metrics_page.h"
#include "tests/support/rapt_messages.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using grpc::StatusCode;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr char kServiceName[] = "rapt.v1.AttentionService";
constexpr v1::Layout kLayouts[] = {v1::BHSD, v1::BSHD, v1::BSE};

std::unique_ptr<v1::AttentionService::Stub> Connect(const ServerProcess& server) {
  grpc::ChannelArguments arguments;
  arguments.SetMaxReceiveMessageSize(-1);
  return v1::AttentionService::NewStub(grpc::CreateCustomChannel(
      server.grpc_address(), grpc::InsecureChannelCredentials(), arguments));
}

// A call is counted once its response has been sent, possibly after its caller has read it.
void WaitForCount(const ServerProcess& server, const char* method, const char* code, int count) {
  test::WaitForMetric(server, "rapt_requests_total", count,
                      {{"code", code}, {"method", absl::StrCat(kServiceName, "/", method)}});
}

// Tests that leave the server unchanged share one.
class RaptServiceTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new ServerProcess({"--threads=2"}); }
  static void TearDownTestSuite() { delete server_; }

  grpc::Status TryAttend(const v1::AttendRequest& request, v1::AttendResponse& response) {
    grpc::ClientContext context;
    return stub_->Attend(&context, request, &response);
  }

  v1::AttendResponse Attend(const v1::AttendRequest& request) {
    v1::AttendResponse response;
    const grpc::Status status = TryAttend(request, response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  grpc::Status TryDiagnose(const v1::AttendRequest& call, v1::DiagnoseResponse& response) {
    grpc::ClientContext context;
    v1::DiagnoseRequest request;
    *request.mutable_call() = call;
    return stub_->Diagnose(&context, request, &response);
  }

  // With the gradient of an output with the shape of Q.
  grpc::Status TryBackward(const v1::AttendRequest& call) {
    grpc::ClientContext context;
    v1::AttendBackwardRequest request;
    *request.mutable_call() = call;
    *request.mutable_dy() = call.q();
    v1::AttendBackwardResponse response;
    return stub_->AttendBackward(&context, request, &response);
  }

  v1::DiagnoseResponse Diagnose(const v1::AttendRequest& call) {
    v1::DiagnoseResponse response;
    const grpc::Status status = TryDiagnose(call, response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  grpc::Status TryEstimate(const v1::EstimateMemoryRequest& request,
                           v1::EstimateMemoryResponse& response) {
    grpc::ClientContext context;
    return stub_->EstimateMemory(&context, request, &response);
  }

  std::unique_ptr<v1::AttentionService::Stub> stub_ = Connect(*server_);
  static ServerProcess* server_;
};

ServerProcess* RaptServiceTest::server_ = nullptr;

// --- Attend --------------------------------------------------------------------------------------

Problem SmallProblem() {
  return {.batch = 2,
          .query_heads = 4,
          .kv_heads = 4,
          .query_length = 5,
          .key_length = 7,
          .head_size = 8,
          .value_head_size = 8};
}

// A message of a hundred bytes must not create a task for each of 2^40 batch rows.
TEST_F(RaptServiceTest, AnswersHugeEmptyCallsAtOnce) {
  v1::AttendRequest request;
  for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
    tensor->set_dtype(v1::FP32);
    for (const int64_t axis : {int64_t{1} << 40, int64_t{1}, int64_t{0}, int64_t{1}}) {
      tensor->add_shape(axis);
    }
  }
  request.set_want_present(true);
  request.set_want_lse(true);
  const v1::AttendResponse response = Attend(request);
  EXPECT_THAT(response.present_key().shape(), ElementsAre(int64_t{1} << 40, 1, 0, 1));
  EXPECT_EQ(Diagnose(request).pairs(), 0);
}

TEST_F(RaptServiceTest, NamesBackendAndPlanInTheTrailers) {
  Problem problem = SmallProblem();
  Rng rng(1);
  grpc::ClientContext context;
  v1::AttendResponse response;
  ASSERT_TRUE(
      stub_->Attend(&context, ToMessage(problem, RandomInputs(problem, rng)), &response).ok());
  std::map<std::string, std::string> trailers;
  for (const auto& [key, value] : context.GetServerTrailingMetadata()) {
    trailers[std::string(key.data(), key.size())] = std::string(value.data(), value.size());
  }
  EXPECT_EQ(trailers["rapt-backend"], response.backend());
  EXPECT_EQ(trailers["rapt-plan"], response.plan());
  EXPECT_THAT(response.plan(), HasSubstr("cpu/"));
}

template <typename Int>
v1::Tensor AsIntegers(const v1::Tensor& bools, v1::DataType dtype) {
  v1::Tensor integers = bools;
  integers.set_dtype(dtype);
  std::vector<Int> values(bools.data().begin(), bools.data().end());
  integers.set_data(
      std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(Int)));
  return integers;
}

TEST_F(RaptServiceTest, IntegerMasksMeanBool) {
  Problem problem = SmallProblem();
  problem.mask = MaskShape{DType::kBool, {2, 1, 5, 7}};
  Rng rng(13);
  v1::AttendRequest request = ToMessage(problem, RandomInputs(problem, rng));
  const std::string want = Attend(request).y().data();
  const v1::Tensor bools = request.mask();
  for (const v1::Tensor& integers :
       {AsIntegers<int8_t>(bools, v1::INT8), AsIntegers<uint8_t>(bools, v1::UINT8),
        AsIntegers<int32_t>(bools, v1::INT32), AsIntegers<int64_t>(bools, v1::INT64)}) {
    *request.mutable_mask() = integers;
    EXPECT_EQ(Attend(request).y().data(), want) << v1::DataType_Name(integers.dtype());
  }
}

// --- Refusals ------------------------------------------------------------------------------------

// Sets a tensor of zeros with the data its shape needs, if the shape is valid.
void SetTensor(v1::Tensor* tensor, const std::vector<int64_t>& shape, v1::DataType dtype = v1::FP32,
               int64_t element_bytes = 4) {
  int64_t count = 1;
  for (const int64_t axis : shape) count *= std::clamp<int64_t>(axis, 0, 100);
  tensor->set_dtype(dtype);
  tensor->mutable_shape()->Assign(shape.begin(), shape.end());
  tensor->set_data(std::string(count * element_bytes, '\0'));
}

// One batch row, two heads, three queries and keys of size 4.
v1::AttendRequest ValidCall() {
  v1::AttendRequest request;
  for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
    SetTensor(tensor, {1, 2, 3, 4});
  }
  return request;
}

struct Refusal {
  const char* name;
  void (*spoil)(v1::AttendRequest& r);
  std::vector<const char*> fragments;
};

constexpr int64_t kHuge = int64_t{1} << 62;

// What only a message can have wrong; operator_calls_test has the values of tensors and attributes.
// Each is INVALID_ARGUMENT for Attend, AttendBackward and Diagnose.
const Refusal kRefusals[] = {
    {"unspecified dtype",
     [](auto& r) { r.mutable_q()->clear_dtype(); },
     {"q has dtype DATA_TYPE_UNSPECIFIED", "FP32, FP16, BF16 or FP64"}},
    {"unknown dtype",
     [](auto& r) { r.mutable_k()->set_dtype(static_cast<v1::DataType>(42)); },
     {"k has dtype 42", "FP32, FP16, BF16 or FP64"}},
    {"integers for numbers",
     [](auto& r) { r.mutable_v()->set_dtype(v1::INT32); },
     {"v has dtype INT32", "FP32, FP16, BF16 or FP64"}},
    {"too little data",
     [](auto& r) { r.mutable_q()->set_data("abc"); },
     {"q has 3 bytes of data", "[1, 2, 3, 4] of FP32 needs 96"}},
    {"too much data",
     [](auto& r) { r.mutable_v()->set_data(std::string(97, '\0')); },
     {"v has 97 bytes of data", "needs 96"}},
    {"no data", [](auto& r) { r.mutable_k()->clear_data(); }, {"k has 0 bytes", "needs 96"}},
    {"elements that overflow",
     [](auto& r) { SetTensor(r.mutable_mask(), {kHuge}, v1::INT64, 8); },
     {"mask has shape [4611686018427387904]", "overflows 64 bits"}},
    {"a rank without end",
     [](auto& r) { SetTensor(r.mutable_q(), std::vector<int64_t>(60000, 1)); },
     {"q has a shape of rank 60000", "at most 4"}},
    {"unknown layout",
     [](auto& r) { r.mutable_attention()->set_layout(static_cast<v1::Layout>(9)); },
     {"attention.layout is 9", "BHSD (1), BSHD (2) or BSE (3)"}},
    {"unknown normalizer",
     [](auto& r) { r.mutable_attention()->set_normalizer(static_cast<v1::Normalizer>(4)); },
     {"attention.normalizer is 4", "SPARSEMAX (1), ENTMAX15 (2) or ENTMAX (3)"}},
    {"unknown alignment",
     [](auto& r) { r.mutable_attention()->set_alignment(static_cast<v1::Alignment>(-1)); },
     {"attention.alignment is -1", "TOP_LEFT (0), BOTTOM_RIGHT (1) or ONNX (2)"}},
    {"unknown score function",
     [](auto& r) {
       r.mutable_attention()->set_score_function(static_cast<v1::ScoreFunction>(256));
     },
     {"attention.score_function is 256", "DOT_PRODUCT (0) or ADDITIVE (1)"}},
    {"unknown score output",
     [](auto& r) { r.set_score_output(static_cast<v1::ScoreOutput>(5)); },
     {"score_output is 5", "WEIGHTS (4)"}},
    {"negative window to the left",
     [](auto& r) { r.mutable_attention()->mutable_window()->set_left(-1); },
     {"attention.window.left is -1", "at least 0, or absent"}},
    {"negative window to the right",
     [](auto& r) { r.mutable_attention()->mutable_window()->set_right(-7); },
     {"attention.window.right is -7", "at least 0, or absent"}},
    {"mask without a dtype",
     [](auto& r) { r.mutable_mask(); },
     {"mask has dtype DATA_TYPE_UNSPECIFIED", "BOOL, INT8, UINT8, INT32 or INT64"}},
    {"integer mask with too little data",
     [](auto& r) { SetTensor(r.mutable_mask(), {3}, v1::INT64, 1); },
     {"mask has 3 bytes of data", "[3] of INT64 needs 24"}},
    {"integer mask with another value",
     [](auto& r) {
       SetTensor(r.mutable_mask(), {3, 3}, v1::UINT8, 1);
       (*r.mutable_mask()->mutable_data())[5] = '\xFF';
     },
     {"mask[1, 2] is 255", "UINT8 masks hold only 0 (hidden) and 1 (visible)"}},
    {"key length beyond the keys",
     [](auto& r) { r.add_key_lengths(4); },
     {"key_lengths[0] is 4", "from 0 to the key length 3"}},
    {"negative key length",
     [](auto& r) { r.add_key_lengths(-1); },
     {"key_lengths[0] is -1", "from 0 to the key length 3"}},
};

TEST_F(RaptServiceTest, RejectsInvalidCallsAndNamesTheError) {
  Attend(ValidCall());
  for (const Refusal& refusal : kRefusals) {
    SCOPED_TRACE(refusal.name);
    v1::AttendRequest request = ValidCall();
    refusal.spoil(request);
    v1::AttendResponse response;
    const grpc::Status attend = TryAttend(request, response);
    EXPECT_EQ(attend.error_code(), StatusCode::INVALID_ARGUMENT) << attend.error_message();
    for (const char* fragment : refusal.fragments) {
      EXPECT_THAT(attend.error_message(), HasSubstr(fragment));
    }
    v1::DiagnoseResponse report;
    const grpc::Status diagnose = TryDiagnose(request, report);
    EXPECT_EQ(diagnose.error_code(), StatusCode::INVALID_ARGUMENT) << diagnose.error_message();
    EXPECT_EQ(diagnose.error_message(), attend.error_message());
    const grpc::Status backward = TryBackward(request);
    EXPECT_EQ(backward.error_code(), StatusCode::INVALID_ARGUMENT) << backward.error_message();
  }
}

TEST_F(RaptServiceTest, RejectsResponsesBeyondTheMessageLimit) {
  v1::AttendRequest request;
  for (v1::Tensor* tensor : {request.mutable_q(), request.mutable_k(), request.mutable_v()}) {
    tensor->set_dtype(v1::FP32);
    for (const int64_t axis : {1, 1, 1 << 15, 1}) tensor->add_shape(axis);
    tensor->set_data(std::string((1 << 15) * 4, '\0'));
  }
  request.set_score_output(v1::SCORES);
  v1::AttendResponse response;
  const std::map<std::string, std::string> too_large = {{"reason", "too_large"}};
  const double before = ReadMetric(*server_, "rapt_rejected_total", too_large);
  const grpc::Status status = TryAttend(request, response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("4295098368 bytes; a response holds at most"));
  WaitForMetric(*server_, "rapt_rejected_total", before + 1, too_large);
}

TEST(RaptServiceBudgetTest, RejectsRequestsBeyondTheMemoryBudget) {
  // 393750 bytes for messages and for outputs each.
  const ServerProcess server(
      {"--memory_budget_bytes=900000", "--max_message_bytes=390000", "--threads=3"});
  const auto stub = Connect(server);
  v1::AttendRequest large = ValidCall();
  for (v1::Tensor* tensor : {large.mutable_q(), large.mutable_k(), large.mutable_v()}) {
    SetTensor(tensor, {1, 1, 100, 100});
    tensor->mutable_shape()->Set(2, 300);
    tensor->set_data(std::string(300 * 100 * 4, '\0'));
  }
  large.set_score_output(v1::WEIGHTS);
  grpc::ClientContext context;
  v1::AttendResponse response;
  grpc::Status status = stub->Attend(&context, large, &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("at most 393750 of the memory budget"));

  v1::DiagnoseRequest wide;  // a row of float64 for each thread
  *wide.mutable_call() = ValidCall();
  SetTensor(wide.mutable_call()->mutable_q(), {1, 1, 1, 1});
  for (v1::Tensor* tensor : {wide.mutable_call()->mutable_k(), wide.mutable_call()->mutable_v()}) {
    SetTensor(tensor, {1, 1, 20000, 1});
    tensor->set_data(std::string(20000 * 4, '\0'));
  }
  grpc::ClientContext diagnose_context;
  v1::DiagnoseResponse diagnosis;
  status = stub->Diagnose(&diagnose_context, wide, &diagnosis);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  WaitForCount(server, "Diagnose", "RESOURCE_EXHAUSTED", 1);
  EXPECT_EQ(test::ReadMetric(server, "rapt_memory_reserved_bytes"), 0);
}

// --- Diagnose ------------------------------------------------------------------------------------

TEST_F(RaptServiceTest, DiagnosisCountsNaNAndInfinity) {
  Problem problem = SmallProblem();
  Rng rng(21);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.query.Set(0, 0, 0, 0, kNan);
  inputs.query.Set(1, 3, 4, 7, kNan);
  inputs.key.Set(0, 1, 2, 3, kInf);
  inputs.value.Set(0, 2, 1, 0, -kInf);
  const v1::DiagnoseResponse report = Diagnose(ToMessage(problem, inputs));
  ASSERT_EQ(report.inputs_size(), 3);
  const v1::TensorReport& q = report.inputs(0);
  EXPECT_EQ(q.name(), "q");
  EXPECT_EQ(q.dtype(), v1::FP32);
  EXPECT_THAT(q.shape(), ElementsAre(2, 4, 5, 8));
  EXPECT_EQ(q.elements(), 2 * 4 * 5 * 8);
  EXPECT_EQ(q.nan_count(), 2);
  EXPECT_EQ(report.inputs(1).positive_inf_count(), 1);
  EXPECT_EQ(report.inputs(2).negative_inf_count(), 1);
  EXPECT_EQ(report.pairs(), 2 * 4 * 5 * 7);
  EXPECT_EQ(report.raw_scores().nan_count(), 2 * 7) << "two rows of Q";
  EXPECT_EQ(report.raw_scores().positive_inf_count() + report.raw_scores().negative_inf_count(), 5)
      << "one column of one head";
  EXPECT_THAT(report.warnings(), Contains(HasSubstr("q has 2 NaN among 320 values")));
  EXPECT_THAT(report.warnings(), Contains(HasSubstr("k has 1 infinite values among 448")));
  EXPECT_THAT(report.problem(), HasSubstr("B=2 Hq=4 Hkv=4 Sq=5 Sk=7 P=0 D=8 Dv=8 FP32"));
}

TEST_F(RaptServiceTest, DiagnosesAFloatMaskOfZerosAndOnes) {
  Problem problem = SmallProblem();
  problem.mask = MaskShape{DType::kFloat32, {1, 1, 5, 7}};
  Rng rng(22);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.mask->Fill(1);
  inputs.mask->Set(0, 0, 0, 3, 0);
  v1::AttendRequest call = ToMessage(problem, inputs);
  const v1::DiagnoseResponse as_float = Diagnose(call);
  EXPECT_THAT(as_float.warnings(),
              Contains(HasSubstr("mask has type FP32 and contains only 0 and 1")));
  EXPECT_EQ(as_float.masked_by_mask(), 0);

  SetTensor(call.mutable_mask(), {5, 7}, v1::INT32, 4);
  for (int n = 0; n < 35; ++n) (*call.mutable_mask()->mutable_data())[4 * n] = n != 3;
  const v1::DiagnoseResponse as_integers = Diagnose(call);
  EXPECT_THAT(as_integers.warnings(), IsEmpty());
  EXPECT_EQ(as_integers.masked_by_mask(), 2 * 4);
  EXPECT_EQ(as_integers.biased_scores().negative_inf_count(), 2 * 4);
  ASSERT_EQ(as_integers.inputs_size(), 4);
  const v1::TensorReport& mask = as_integers.inputs(3);
  EXPECT_EQ(mask.name(), "mask");
  EXPECT_EQ(mask.dtype(), v1::INT32) << "as it was sent";
  EXPECT_THAT(mask.shape(), ElementsAre(5, 7));
  EXPECT_NEAR(mask.mean(), 34.0 / 35, 1e-12);
}

TEST_F(RaptServiceTest, DiagnosesRowsThatSeeNothing) {
  Problem problem = SmallProblem();
  problem.query_length = 7;
  problem.key_length = 5;
  problem.causal = true;
  problem.alignment = Alignment::kBottomRight;  // the first two queries see no key
  Rng rng(23);
  const v1::DiagnoseResponse report = Diagnose(ToMessage(problem, RandomInputs(problem, rng)));
  EXPECT_EQ(report.empty_rows().count(), 2 * 4 * 2);
  ASSERT_EQ(report.empty_rows().first_size(), 8);
  EXPECT_EQ(report.empty_rows().first(3).batch(), 0);
  EXPECT_EQ(report.empty_rows().first(3).head(), 1);
  EXPECT_EQ(report.empty_rows().first(3).query(), 1);
  EXPECT_EQ(report.masked_by_position(), 2 * 4 * (5 + 5 + 4 + 3 + 2 + 1));
  EXPECT_EQ(report.masked_by_mask(), 0);
  EXPECT_NEAR(report.row_sums().min(), 1, 1e-12);
  EXPECT_THAT(report.warnings(), Contains(HasSubstr("see no key: 16")));
}

TEST_F(RaptServiceTest, DiagnosesGroupsPastAndLayout) {
  Problem problem = SmallProblem();
  problem.dtype = DType::kBFloat16;
  problem.kv_heads = 2;
  problem.past_length = 3;
  problem.causal = true;
  Rng rng(24);
  const Inputs inputs = RandomInputs(problem, rng);
  const Expected expected = rapt::test::Attend(problem, inputs);
  const auto [least, most] = std::minmax_element(expected.output.begin(), expected.output.end());
  for (const v1::Layout layout : kLayouts) {
    const v1::AttendRequest call = ToMessage(problem, inputs, layout);
    const v1::DiagnoseResponse report = Diagnose(call);
    SCOPED_TRACE(v1::Layout_Name(layout));
    std::vector<std::string> names;
    for (const v1::TensorReport& input : report.inputs()) names.push_back(input.name());
    EXPECT_THAT(names, ElementsAre("q", "k", "v", "past_key", "past_value"));
    EXPECT_EQ(report.inputs(0).shape_size(), call.q().shape_size()) << "as it was sent";
    EXPECT_EQ(report.pairs(), 2 * 4 * 5 * 10);
    EXPECT_EQ(report.masked_by_position(), 2 * 4 * (6 + 5 + 4 + 3 + 2));
    EXPECT_NEAR(report.output().min(), *least, 1e-9);
    EXPECT_NEAR(report.output().max(), *most, 1e-9);
    EXPECT_THAT(report.problem(), HasSubstr("Hq=4 Hkv=2 Sq=5 Sk=7 P=3 D=8 Dv=8 BF16"));
    EXPECT_THAT(report.warnings(), IsEmpty());
  }
}

TEST_F(RaptServiceTest, DiagnosisNamesTheBackendOfAttend) {
  const v1::AttendResponse response = Attend(ValidCall());
  const v1::DiagnoseResponse report = Diagnose(ValidCall());
  ASSERT_GE(report.backends_size(), 2);
  const auto chosen = std::find_if(report.backends().begin(), report.backends().end(),
                                   [](const v1::BackendChoice& choice) { return choice.chosen(); });
  ASSERT_NE(chosen, report.backends().end());
  EXPECT_EQ(chosen->backend(), response.backend());
  EXPECT_EQ(chosen->plan(), response.plan());
  EXPECT_GT(chosen->workspace_bytes(), 0);
  const v1::BackendChoice& last = report.backends(report.backends_size() - 1);
  EXPECT_EQ(last.backend(), "reference");
  EXPECT_FALSE(last.chosen());
  EXPECT_THAT(last.reason(), HasSubstr("auto prefers"));
}

TEST_F(RaptServiceTest, DiagnosesEmptyCalls) {
  Problem problem = SmallProblem();
  problem.batch = 0;
  Rng rng(25);
  const v1::DiagnoseResponse report = Diagnose(ToMessage(problem, RandomInputs(problem, rng)));
  EXPECT_EQ(report.pairs(), 0);
  EXPECT_FALSE(report.output().has_min());
  EXPECT_FALSE(report.inputs(0).has_mean());
}

// Takes minutes, in thousands of tasks.
v1::DiagnoseRequest LongDiagnosis() {
  constexpr int64_t kLength = 16384, kSize = 64;
  v1::DiagnoseRequest request;
  v1::AttendRequest& call = *request.mutable_call();
  for (v1::Tensor* tensor : {call.mutable_q(), call.mutable_k(), call.mutable_v()}) {
    tensor->set_dtype(v1::FP16);
    for (const int64_t axis : {int64_t{1}, int64_t{4}, kLength, kSize}) tensor->add_shape(axis);
    tensor->set_data(std::string(4 * kLength * kSize * 2, '\x3A'));
  }
  return request;
}

TEST(RaptServiceDiagnoseTest, ACancelledDiagnosisEndsOnTheServer) {
  const ServerProcess server({"--threads=2"});
  const auto stub = Connect(server);
  grpc::ClientContext context;
  v1::DiagnoseResponse response;
  std::future<grpc::Status> status = std::async(
      std::launch::async, [&] { return stub->Diagnose(&context, LongDiagnosis(), &response); });
  test::WaitForMetric(server, "rapt_open_calls", 1);
  context.TryCancel();
  EXPECT_EQ(status.get().error_code(), StatusCode::CANCELLED);
  WaitForCount(server, "Diagnose", "CANCELLED", 1);
  EXPECT_EQ(test::ReadMetric(server, "rapt_memory_reserved_bytes"), 0);
}

TEST(RaptServiceDiagnoseTest, ADeadlineEndsADiagnosis) {
  const ServerProcess server({"--threads=2"});
  const auto stub = Connect(server);
  grpc::ClientContext context;
  context.set_deadline(std::chrono::system_clock::now() + std::chrono::milliseconds(300));
  v1::DiagnoseResponse response;
  EXPECT_EQ(stub->Diagnose(&context, LongDiagnosis(), &response).error_code(),
            StatusCode::DEADLINE_EXCEEDED);
  // gRPC also cancels a call whose deadline passed; either may reach the executor first.
  test::WaitForMetric(server, "rapt_open_calls", 0);
}

// --- EstimateMemory ------------------------------------------------------------------------------

v1::EstimateMemoryRequest TutorialSizes() {
  v1::EstimateMemoryRequest request;
  request.set_batch(32);
  request.set_query_heads(8);
  for (const int64_t length : {512, 1024, 2048}) request.add_lengths(length);
  return request;
}

TEST_F(RaptServiceTest, EstimatesMemory) {
  v1::EstimateMemoryResponse response;
  const grpc::Status status = TryEstimate(TutorialSizes(), response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  EXPECT_EQ(response.chunk(), kEstimateChunk);
  ASSERT_EQ(response.estimates_size(), 3);
  constexpr int64_t kMiB = 1 << 20;
  for (int n = 0; n < 3; ++n) {
    const v1::MemoryEstimate& estimate = response.estimates(n);
    const int64_t length = int64_t{512} << n;
    EXPECT_EQ(estimate.length(), length);
    EXPECT_EQ(estimate.standard_bytes(), 256 * kMiB << (2 * n));
    EXPECT_EQ(estimate.tensor_bytes(), 128 * kMiB << n);
    EXPECT_EQ(estimate.chunked_bytes(), 32 * 8 * length * (kEstimateChunk + 2 + 64) * 4);
    EXPECT_LE(estimate.fused_bytes(), kMiB) << "hardly grows with the length";
    EXPECT_THAT(estimate.plan(), HasSubstr("cpu/"));
  }
}

TEST_F(RaptServiceTest, EstimatesAPlanToTheByte) {
  v1::EstimateMemoryRequest request;
  request.set_batch(2);
  request.set_query_heads(6);
  request.set_kv_heads(2);
  request.set_head_size(40);
  request.set_value_head_size(24);
  request.set_dtype(v1::FP16);
  request.add_lengths(333);
  v1::EstimateMemoryResponse response;
  ASSERT_TRUE(TryEstimate(request, response).ok());
  const Problem problem = {.dtype = DType::kFloat16,
                           .batch = 2,
                           .query_heads = 6,
                           .kv_heads = 2,
                           .query_length = 333,
                           .key_length = 333,
                           .head_size = 40,
                           .value_head_size = 24};
  const absl::StatusOr<Plan> plan = MakePlan(problem, {.threads = 2});
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(response.estimates(0).fused_bytes(), plan->workspace_bytes());
  EXPECT_EQ(response.estimates(0).plan(), plan->Describe());
  EXPECT_EQ(response.estimates(0).tensor_bytes(), 2 * 2 * 333 * (6 + 2) * (40 + 24));
}

TEST_F(RaptServiceTest, EstimatesAttentionInLinearTime) {
  v1::EstimateMemoryRequest request;
  request.set_batch(1);
  request.set_query_heads(2);
  for (const int64_t length : {128, 32768}) request.add_lengths(length);
  v1::EstimateMemoryResponse response;
  ASSERT_TRUE(TryEstimate(request, response).ok());
  constexpr int64_t kFeatures = 266;  // floor(64 ln 64)
  for (const v1::MemoryEstimate& estimate : response.estimates()) {
    EXPECT_EQ(estimate.linear().state_bytes(), 2 * kFeatures * (64 + 1) * 4);
    EXPECT_THAT(estimate.linear().plan(), HasSubstr("cpu/"));
    EXPECT_THAT(estimate.lsh().plan(), HasSubstr("cpu/"));
  }
  const v1::MemoryEstimate& shortest = response.estimates(0);
  const v1::MemoryEstimate& longest = response.estimates(1);
  EXPECT_EQ(longest.linear().workspace_bytes(), shortest.linear().workspace_bytes());
  EXPECT_LT(longest.lsh().workspace_bytes(), longest.standard_bytes() / 100);
  EXPECT_GT(longest.lsh().workspace_bytes(), longest.fused_bytes());

  request.set_lsh_hashes(1);
  request.set_lsh_chunk_length(128);
  request.set_favor_features(16);
  v1::EstimateMemoryResponse fewer;
  ASSERT_TRUE(TryEstimate(request, fewer).ok());
  EXPECT_EQ(fewer.estimates(1).linear().state_bytes(), 2 * 16 * (64 + 1) * 4);
  EXPECT_LT(fewer.estimates(1).lsh().workspace_bytes(), longest.lsh().workspace_bytes());
}

TEST_F(RaptServiceTest, EstimatesWhatInputsSave) {
  v1::EstimateMemoryRequest request = TutorialSizes();
  request.set_kv_heads(2);
  request.set_block_q(64);
  request.set_block_k(32);
  request.set_selected_indices(16);
  request.set_relative_bias(127);
  request.set_per_head(true);
  v1::EstimateMemoryResponse response;
  const grpc::Status status = TryEstimate(request, response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  for (const v1::MemoryEstimate& estimate : response.estimates()) {
    const int64_t length = estimate.length();
    const int64_t pairs = length * length;
    const struct {
      const char* name;
      int64_t bytes;
      int64_t mask_bytes;
    } expected[] = {
        {"block_mask", 8 * (length / 64) * (length / 32), 8 * pairs},
        {"selected_indices", 32 * 2 * length * 16 * 4, 32 * 8 * pairs},
        {"relative_bias", 8 * 127 * 4, 8 * pairs * 4},
    };
    ASSERT_EQ(estimate.inputs_size(), 3);
    for (int n = 0; n < 3; ++n) {
      const v1::InputEstimate& input = estimate.inputs(n);
      EXPECT_EQ(input.name(), expected[n].name);
      EXPECT_EQ(input.bytes(), expected[n].bytes) << input.name();
      EXPECT_EQ(input.saved_bytes(), expected[n].mask_bytes - expected[n].bytes) << input.name();
    }
  }
}

TEST_F(RaptServiceTest, RejectsInvalidSizes) {
  const struct {
    void (*spoil)(v1::EstimateMemoryRequest& r);
    const char* fragment;
  } cases[] = {
      {[](auto& r) { r.set_batch(0); }, "batch is 0; it must be in [1, 2^40]"},
      {[](auto& r) { r.set_query_heads(-8); }, "query_heads is -8"},
      {[](auto& r) { r.set_query_heads(0); }, "query_heads is 0; it must be in [1, 2^40]"},
      {[](auto& r) { r.set_kv_heads(-1); }, "kv_heads is -1"},
      {[](auto& r) { r.set_kv_heads(3); }, "query_heads is 8, kv_heads is 3"},
      {[](auto& r) { r.set_head_size(-64); }, "head_size is -64"},
      {[](auto& r) { r.set_value_head_size(kHuge); }, "value_head_size is 4611686018427387904"},
      {[](auto& r) { r.clear_lengths(); }, "lengths has 0 entries; it must have 1 to 1024"},
      {[](auto& r) {
         for (int n = 0; n < 1022; ++n) r.add_lengths(1);
       },
       "lengths has 1025 entries"},
      {[](auto& r) { r.set_lengths(1, 0); }, "lengths[1] is 0"},
      {[](auto& r) { r.set_lengths(2, kHuge); }, "lengths[2] is 4611686018427387904"},
      {[](auto& r) { r.set_lengths(2, int64_t{1} << 40); }, "overflows 64 bits"},
      {[](auto& r) { r.set_block_q(64); }, "block_mask is set but block_k is not"},
      {[](auto& r) { r.set_block_k(-1); }, "block_k is -1; it must be at least 1"},
      {[](auto& r) { r.set_selected_indices(-1); }, "selected_indices has a last axis of -1"},
      {[](auto& r) { r.set_selected_indices(kHuge); }, "selected_indices has a last axis of"},
      {[](auto& r) { r.set_bias_table(1); }, "bias_table has 1 buckets"},
      {[](auto& r) { r.set_relative_bias(2); }, "relative_bias has 2 distances"},
      {[](auto& r) {
         r.set_alibi(true);
         r.set_relative_bias(3);
       },
       "alibi and relative_bias are both set"},
      {[](auto& r) { r.set_lsh_hashes(-1); }, "lsh_hashes is -1; it must be from 1 to 1024"},
      {[](auto& r) { r.set_lsh_chunk_length(-1); }, "lsh_chunk_length is -1"},
      {[](auto& r) { r.set_favor_features(-1); }, "favor_features is -1"},
      {[](auto& r) { r.set_dtype(v1::BOOL); }, "dtype is BOOL; it must be FP32, FP16"},
      {[](auto& r) { r.set_dtype(v1::INT8); }, "dtype is INT8"},
      {[](auto& r) { r.set_dtype(static_cast<v1::DataType>(77)); }, "dtype is 77"},
  };
  for (const auto& c : cases) {
    v1::EstimateMemoryRequest request = TutorialSizes();
    c.spoil(request);
    v1::EstimateMemoryResponse response;
    const grpc::Status status = TryEstimate(request, response);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT) << c.fragment;
    EXPECT_THAT(status.error_message(), HasSubstr(c.fragment));
  }
}

// --- GetServerInfo -------------------------------------------------------------------------------

v1::GetServerInfoResponse InfoOf(const ServerProcess& server) {
  grpc::ClientContext context;
  v1::GetServerInfoResponse info;
  const grpc::Status status = Connect(server)->GetServerInfo(&context, {}, &info);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return info;
}

TEST_F(RaptServiceTest, ReturnsVersionAndBackends) {
  const v1::GetServerInfoResponse info = InfoOf(*server_);
  EXPECT_EQ(info.version(), std::string(Version()));
  EXPECT_EQ(info.backend(), "auto");
  EXPECT_EQ(info.isa(), "auto");
  EXPECT_EQ(info.compute_threads(), 2);
  EXPECT_GT(info.memory_budget_bytes(), 0);
  EXPECT_EQ(info.max_message_bytes(), 256 << 20);
  const cudnn::CudnnBackend without_device;
  const BackendSet backends({&without_device});
  ASSERT_EQ(info.backends_size(), static_cast<int>(backends.size()));
  for (int n = 0; n < info.backends_size(); ++n) {
    EXPECT_EQ(info.backends(n).name(), std::string(backends[n]->name()));
    EXPECT_EQ(info.backends(n).available(), backends[n]->Available().ok());
    EXPECT_EQ(info.backends(n).reason().empty(), info.backends(n).available());
  }
}

TEST(RaptServiceInfoTest, ReturnsAdmissionLimits) {
  const ServerProcess server({"--memory_budget_bytes=16777216", "--max_open_calls=11",
                              "--max_calls_per_caller=12", "--max_queued_requests=13",
                              "--max_queue_delay=14ms", "--min_receive_bytes_per_second=15",
                              "--default_deadline=16s", "--max_deadline=17s"});
  const v1::AdmissionLimits limits = InfoOf(server).admission();
  EXPECT_EQ(limits.max_open_calls(), 11);
  EXPECT_EQ(limits.max_calls_per_caller(), 12);
  EXPECT_EQ(limits.max_compute_bytes(), 7 << 20) << "7/16 of the budget";
  EXPECT_EQ(limits.max_queued_requests(), 13);
  EXPECT_EQ(limits.max_queue_delay_ms(), 14);
  EXPECT_EQ(limits.min_receive_bytes_per_second(), 15);
  EXPECT_EQ(limits.default_deadline_ms(), 16'000);
  EXPECT_EQ(limits.max_deadline_ms(), 17'000);
}

TEST(RaptServiceInfoTest, ReturnsTheLimitsOfCachesIfThereAreAny) {
  const ServerProcess server({"--kv_cache_bytes=33554432", "--kv_max_bytes_per_caller=2000000",
                              "--kv_max_caches_per_caller=18", "--kv_default_lease=19s",
                              "--kv_max_lease=20m"});
  const v1::CacheLimits limits = InfoOf(server).caches();
  EXPECT_EQ(limits.max_bytes(), 33554432);
  EXPECT_EQ(limits.max_bytes_per_caller(), 2000000);
  EXPECT_EQ(limits.max_caches_per_caller(), 18);
  EXPECT_EQ(limits.default_lease_ms(), 19'000);
  EXPECT_EQ(limits.max_lease_ms(), 20 * 60'000);
  EXPECT_FALSE(InfoOf(ServerProcess({"--threads=1"})).has_caches());
}

TEST(RaptServiceInfoTest, ReturnsTheInstructionSetInUse) {
  const ServerProcess server({"--isa=portable", "--threads=3", "--max_message_bytes=800000",
                              "--memory_budget_bytes=2000000", "--backend=cpu"});
  const v1::GetServerInfoResponse info = InfoOf(server);
  EXPECT_EQ(info.backend(), "cpu");
  EXPECT_EQ(info.isa(), "portable");
  EXPECT_EQ(info.compute_threads(), 3);
  EXPECT_EQ(info.max_message_bytes(), 800000);
  EXPECT_EQ(info.memory_budget_bytes(), 2000000);
  EXPECT_EQ(info.memory_reserved_bytes(), 0);
  std::vector<std::string> in_use;
  for (const v1::BackendInfo& backend : info.backends()) {
    for (const v1::InstructionSetInfo& set : backend.instruction_sets()) {
      if (set.in_use()) in_use.push_back(absl::StrCat(backend.name(), "/", set.name()));
    }
  }
  EXPECT_THAT(in_use, ElementsAre("cpu/portable"));
}

}  // namespace
}  // namespace rapt::test
