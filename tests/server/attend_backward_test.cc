// AttendBackward and the model attention_backward of the real rapt-server. The gradients are
// compared with differences of the forward pass, which the server computes as well.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>
#include <future>
#include <limits>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "attention/half.h"
#include "proto/inference/grpc_service.grpc.pb.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "tests/support/metrics_page.h"
#include "tests/support/rapt_messages.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using grpc::StatusCode;
using inference::ModelInferRequest;
using ::testing::Each;
using ::testing::HasSubstr;

constexpr char kMethod[] = "rapt.v1.AttentionService/AttendBackward";
constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

template <typename Service>
std::unique_ptr<typename Service::Stub> Connect(const ServerProcess& server) {
  return Service::NewStub(
      grpc::CreateChannel(server.grpc_address(), grpc::InsecureChannelCredentials()));
}

std::vector<double> ValuesOf(const v1::Tensor& tensor) {
  DType dtype = DType::kFloat64;
  for (DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    if (CodeOf(type) == tensor.dtype()) dtype = type;
  }
  const auto* data = reinterpret_cast<const std::byte*>(tensor.data().data());
  std::vector<double> values(tensor.data().size() / static_cast<size_t>(SizeOf(dtype)));
  for (size_t n = 0; n < values.size(); ++n) {
    values[n] = LoadElement(data, dtype, static_cast<int64_t>(n));
  }
  return values;
}

void SetValues(const std::vector<double>& values, v1::Tensor& tensor) {
  tensor.set_dtype(v1::FP64);
  tensor.set_data({reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double)});
}

std::vector<double> RandomValues(size_t count, Rng& rng) {
  std::vector<double> values(count);
  for (double& value : values) value = Uniform(rng, -1, 1);
  return values;
}

double Dot(const std::vector<double>& a, const std::vector<double>& b) {
  double sum = 0;
  for (size_t n = 0; n < a.size(); ++n) sum += a[n] * b[n];
  return sum;
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

// Access to a tensor by the name of its field.
const v1::Tensor* Find(const google::protobuf::Message& message, const std::string& field) {
  const auto* descriptor = message.GetDescriptor()->FindFieldByName(field);
  if (!message.GetReflection()->HasField(message, descriptor)) return nullptr;
  return static_cast<const v1::Tensor*>(&message.GetReflection()->GetMessage(message, descriptor));
}

v1::Tensor& Mutable(google::protobuf::Message& message, const std::string& field) {
  const auto* descriptor = message.GetDescriptor()->FindFieldByName(field);
  return *static_cast<v1::Tensor*>(message.GetReflection()->MutableMessage(&message, descriptor));
}

// "k" of "dk", "mask" of "d_mask".
std::string InputOf(absl::string_view gradient) {
  absl::ConsumePrefix(&gradient, "d");
  absl::ConsumePrefix(&gradient, "_");
  return std::string(gradient);
}

// The fields of the response that are gradients.
std::vector<std::string> AllGradients() {
  std::vector<std::string> names;
  const auto& response = *v1::AttendBackwardResponse::descriptor();
  for (int n = 0; n < response.field_count(); ++n) {
    if (response.field(n)->message_type() == v1::Tensor::descriptor()) {
      names.push_back(response.field(n)->name());
    }
  }
  return names;
}

v1::AttendBackwardResponse BackwardBy(v1::AttentionService::Stub& stub,
                                      const v1::AttendBackwardRequest& request) {
  grpc::ClientContext context;
  v1::AttendBackwardResponse response;
  const grpc::Status status = stub.AttendBackward(&context, request, &response);
  EXPECT_TRUE(status.ok()) << status.error_message();
  return response;
}

// Tests that leave the server unchanged share one.
class AttendBackwardTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new ServerProcess({"--threads=2"}); }
  static void TearDownTestSuite() { delete server_; }

  v1::AttendResponse Attend(const v1::AttendRequest& request) {
    grpc::ClientContext context;
    v1::AttendResponse response;
    const grpc::Status status = stub_->Attend(&context, request, &response);
    EXPECT_TRUE(status.ok()) << status.error_message();
    return response;
  }

  v1::AttendBackwardResponse Backward(const v1::AttendBackwardRequest& request) {
    return BackwardBy(*stub_, request);
  }

  // A backward pass of `call` with random gradients of its outputs, which returns every gradient.
  v1::AttendBackwardRequest BackwardOf(const v1::AttendRequest& call, bool has_lse, Rng& rng) {
    v1::AttendBackwardRequest request;
    *request.mutable_call() = call;
    v1::AttendRequest with_lse = call;
    with_lse.set_want_lse(has_lse);
    const v1::AttendResponse forward = Attend(with_lse);
    *request.mutable_dy() = forward.y();
    SetValues(RandomValues(ValuesOf(forward.y()).size(), rng), *request.mutable_dy());
    if (has_lse) {
      *request.mutable_dlse() = forward.lse();
      SetValues(RandomValues(ValuesOf(forward.lse()).size(), rng), *request.mutable_dlse());
    }
    for (const std::string& gradient : AllGradients()) {
      const v1::Tensor* input = Find(call, InputOf(gradient));
      if (input != nullptr && input->dtype() != v1::BOOL) request.add_gradients(gradient);
    }
    return request;
  }

  // The loss of which `request` has the gradients by the outputs.
  double LossOf(const v1::AttendBackwardRequest& request, v1::AttendRequest call) {
    call.set_want_lse(request.has_dlse());
    const v1::AttendResponse forward = Attend(call);
    double loss = Dot(ValuesOf(forward.y()), ValuesOf(request.dy()));
    if (request.has_dlse()) {
      std::vector<double> lse = ValuesOf(forward.lse());
      for (double& value : lse) value = std::isfinite(value) ? value : 0;  // rows without a key
      loss += Dot(lse, ValuesOf(request.dlse()));
    }
    return loss;
  }

  // The derivative of the loss by `input` in the direction `u`.
  double SlopeOf(const v1::AttendBackwardRequest& request, const std::string& input,
                 const std::vector<double>& u) {
    constexpr double kStep = 1e-5;
    const std::vector<double> center = ValuesOf(*Find(request.call(), input));
    const auto loss_at = [&](double step) {
      std::vector<double> values = center;
      for (size_t n = 0; n < values.size(); ++n) values[n] += step * u[n];
      v1::AttendRequest call = request.call();
      SetValues(values, Mutable(call, input));
      return LossOf(request, std::move(call));
    };
    return (loss_at(kStep) - loss_at(-kStep)) / (2 * kStep);
  }

  void ExpectSlopes(const v1::AttendBackwardRequest& request, Rng& rng) {
    const v1::AttendBackwardResponse response = Backward(request);
    for (const std::string& gradient : AllGradients()) {
      SCOPED_TRACE(gradient);
      const auto& names = request.gradients();
      const v1::Tensor* got = Find(response, gradient);
      ASSERT_EQ(got != nullptr, std::find(names.begin(), names.end(), gradient) != names.end());
      if (got == nullptr) continue;
      const v1::Tensor& input = *Find(request.call(), InputOf(gradient));
      EXPECT_EQ(got->dtype(), input.dtype());
      EXPECT_EQ(std::vector<int64_t>(got->shape().begin(), got->shape().end()),
                std::vector<int64_t>(input.shape().begin(), input.shape().end()));
      const std::vector<double> values = ValuesOf(*got);
      const std::vector<double> u = RandomValues(values.size(), rng);
      const double want = SlopeOf(request, InputOf(gradient), u);
      EXPECT_NEAR(Dot(values, u), want, 1e-7 * std::max(1.0, std::abs(want)));
    }
  }

  std::unique_ptr<v1::AttentionService::Stub> stub_ = Connect<v1::AttentionService>(*server_);
  static ServerProcess* server_;
};

ServerProcess* AttendBackwardTest::server_ = nullptr;

Problem SmallProblem() {
  return {.dtype = DType::kFloat64,
          .batch = 2,
          .query_heads = 4,
          .kv_heads = 2,
          .query_length = 5,
          .key_length = 7,
          .head_size = 8,
          .value_head_size = 6};
}

struct Feature {
  const char* name;
  void (*change)(Problem& p);
};

// Of inputs in FP64, so that each has a difference.
constexpr Feature kFeatures[] = {
    {"plain", [](Problem&) {}},
    {"causal", [](Problem& p) { p.causal = true; }},
    {"softcap and scale", [](Problem& p) { p.softcap = 1.5, p.scale = -0.75; }},
    {"window and lengths",
     [](Problem& p) {
       p.left_window = 1, p.right_window = 2;
       p.has_key_lengths = true;
     }},
    {"mask and bias",
     [](Problem& p) {
       p.mask = MaskShape{DType::kFloat64, {2, 1, 5, 7}};
       p.bias = MaskShape{DType::kFloat64, {1, 4, 1, 7}};
     }},
    {"mask of bools and a short bias",
     [](Problem& p) {
       p.mask = MaskShape{DType::kBool, {2, 4, 5, 7}};
       p.bias = MaskShape{DType::kFloat64, {1, 1, 5, 4}};
     }},
    {"past",
     [](Problem& p) {
       p.past_length = 3;
       p.causal = true;
     }},
    {"sink", [](Problem& p) { p.head_sink = DType::kFloat64; }},
    {"slopes",
     [](Problem& p) {
       p.alibi_slopes = AlibiSlopes{DType::kFloat64, p.batch};
     }},
    {"buckets",
     [](Problem& p) {
       p.bias_table = BiasTable{DType::kFloat64, 8};
       p.is_bidirectional = true;
       p.max_distance = 4;
     }},
    {"clipped distances",
     [](Problem& p) {
       p.relative_bias = RelativeBias{DType::kFloat64, p.query_heads, 5};
     }},
    {"vectors by distance",
     [](Problem& p) {
       p.relative_keys = RelativeVectors{DType::kFloat64, p.query_heads, 5};
       p.relative_values = RelativeVectors{DType::kFloat64, 1, 3};
     }},
    {"relative query",
     [](Problem& p) {
       p.relative_keys = RelativeVectors{DType::kFloat64, 1, 3};
       p.has_relative_query = true;
     }},
    {"additive scores",
     [](Problem& p) {
       p.score_function = ScoreFunction::kAdditive;
       p.additive_weight = AdditiveWeight{DType::kFloat64, p.query_heads};
     }},
    {"rotary",
     [](Problem& p) {
       p.rope_theta = 100;
       p.past_length = 2;
     }},
    {"dropout",
     [](Problem& p) { p.dropout = Dropout{.probability = 0.3, .seed = 0x123456789ABCDEF0}; }},
    {"values in keys", [](Problem& p) { p.values_in_keys = true; }},
    {"block mask",
     [](Problem& p) {
       p.block_mask = std::array<int64_t, 4>{2, 1, 3, 3};
       p.block_q = 2;
       p.block_k = 3;
     }},
    {"selected keys",
     [](Problem& p) {
       p.selected = SelectedIndices{p.kv_heads, 4};
     }},
    {"sparsemax", [](Problem& p) { p.normalizer = Normalizer::kSparsemax; }},
    {"entmax",
     [](Problem& p) {
       p.normalizer = Normalizer::kEntmax;
       p.alpha = 1.25;
     }},
    {"everything at once",
     [](Problem& p) {
       p.past_length = 4;
       p.softcap = 3;
       p.causal = true;
       p.left_window = 6;
       p.mask = MaskShape{DType::kFloat64, {2, 1, 5, 11}};
       p.has_key_lengths = true;
       p.head_sink = DType::kFloat64;
       p.relative_bias = RelativeBias{DType::kFloat64, 1, 5};
       p.dropout = Dropout{.probability = 0.2, .seed = 7};
     }},
};

TEST_F(AttendBackwardTest, ReturnsTheSlopesOfTheForwardPassForEveryFeature) {
  for (const Feature& feature : kFeatures) {
    for (const v1::Layout layout : {v1::BHSD, v1::BSHD, v1::BSE}) {
      SCOPED_TRACE(absl::StrCat(feature.name, " ", v1::Layout_Name(layout)));
      Problem problem = SmallProblem();
      feature.change(problem);
      Rng rng(17);
      const v1::AttendRequest call = ToMessage(problem, RandomInputs(problem, rng), layout);
      ExpectSlopes(BackwardOf(call, problem.normalizer == Normalizer::kSoftmax, rng), rng);
      if (HasFailure()) return;
    }
  }
}

// Too large to run inline.
TEST_F(AttendBackwardTest, ComputesLargeProblemsOnAllThreads) {
  Problem problem = SmallProblem();
  problem.query_length = problem.key_length = 200;
  problem.causal = true;
  Rng rng(3);
  const v1::AttendRequest call = ToMessage(problem, RandomInputs(problem, rng));
  const v1::AttendBackwardRequest request = BackwardOf(call, true, rng);
  ExpectSlopes(request, rng);
  const v1::AttendBackwardResponse first = Backward(request), second = Backward(request);
  EXPECT_EQ(first.dk().data(), second.dk().data());
  EXPECT_EQ(first.plan(), second.plan());
  EXPECT_GT(first.timing().compute_us(), 0);
}

// The largest difference relative to the largest value.
double Distance(const v1::Tensor& got, const v1::Tensor& want) {
  const std::vector<double> a = ValuesOf(got), b = ValuesOf(want);
  double difference = 0, largest = 0;
  for (size_t n = 0; n < b.size(); ++n) {
    difference = std::max(difference, std::abs(a.at(n) - b[n]));
    largest = std::max(largest, std::abs(b[n]));
  }
  return difference / largest;
}

TEST_F(AttendBackwardTest, EqualsTheReferenceBackendForEveryFeature) {
  const ServerProcess server({"--threads=2", "--backend=reference"});
  const auto reference = Connect<v1::AttentionService>(server);
  for (const Feature& feature : kFeatures) {
    SCOPED_TRACE(feature.name);
    Problem problem = SmallProblem();
    feature.change(problem);
    Rng rng(19);
    const v1::AttendRequest call = ToMessage(problem, RandomInputs(problem, rng));
    const v1::AttendBackwardRequest request =
        BackwardOf(call, problem.normalizer == Normalizer::kSoftmax, rng);
    const v1::AttendBackwardResponse got = Backward(request);
    const v1::AttendBackwardResponse want = BackwardBy(*reference, request);
    EXPECT_EQ(want.backend(), "reference");
    for (const std::string& gradient : request.gradients()) {
      EXPECT_LT(Distance(*Find(got, gradient), *Find(want, gradient)), 1e-12) << gradient;
    }
  }
}

TEST_F(AttendBackwardTest, TakesTheResultOfTheForwardPassOrComputesItAgain) {
  const Problem problem = SmallProblem();
  Rng rng(5);
  v1::AttendRequest call = ToMessage(problem, RandomInputs(problem, rng));
  v1::AttendBackwardRequest request = BackwardOf(call, true, rng);
  const v1::AttendBackwardResponse again = Backward(request);
  call.set_want_lse(true);
  const v1::AttendResponse forward = Attend(call);
  *request.mutable_y() = forward.y();
  *request.mutable_lse() = forward.lse();
  const v1::AttendBackwardResponse taken = Backward(request);
  EXPECT_LT(Distance(taken.dq(), again.dq()), 1e-13);
  EXPECT_LT(Distance(taken.dk(), again.dk()), 1e-13);
  EXPECT_LT(Distance(taken.dv(), again.dv()), 1e-13);
  // It is read, not only accepted.
  SetValues(std::vector<double>(ValuesOf(forward.lse()).size(), 0), *request.mutable_lse());
  EXPECT_GT(Distance(Backward(request).dv(), again.dv()), 0.1);
}

v1::Tensor InFp64(const v1::Tensor& tensor) {
  v1::Tensor wide = tensor;
  SetValues(ValuesOf(tensor), wide);
  return wide;
}

TEST_F(AttendBackwardTest, ComputesEveryType) {
  const std::pair<DType, double> types[] = {
      {DType::kFloat32, 1e-5}, {DType::kFloat16, 4e-3}, {DType::kBFloat16, 3e-2}};
  for (const auto& [dtype, tolerance] : types) {
    SCOPED_TRACE(NameOf(dtype));
    Problem problem = SmallProblem();
    problem.dtype = dtype;
    Rng rng(7);
    const Inputs inputs = RandomInputs(problem, rng);
    v1::AttendBackwardRequest request;
    *request.mutable_call() = ToMessage(problem, inputs);
    Tensor dy(dtype, {2, 4, 5, 6});
    *request.mutable_dy() = ToMessage(dy.FillUniform(rng, -1, 1));
    const v1::AttendBackwardResponse got = Backward(request);
    EXPECT_EQ(got.dk().dtype(), CodeOf(dtype));
    v1::AttendRequest& call = *request.mutable_call();
    for (v1::Tensor* tensor :
         {call.mutable_q(), call.mutable_k(), call.mutable_v(), request.mutable_dy()}) {
      *tensor = InFp64(*tensor);
    }
    const v1::AttendBackwardResponse want = Backward(request);
    EXPECT_LT(Distance(got.dq(), want.dq()), tolerance);
    EXPECT_LT(Distance(got.dk(), want.dk()), tolerance);
    EXPECT_LT(Distance(got.dv(), want.dv()), tolerance);
  }
}

// Without queries nothing changes the loss: a gradient is zero, not what its memory held before.
TEST_F(AttendBackwardTest, GradientsOfWhatIsNotUsedAreZero) {
  Problem problem = SmallProblem();
  Rng rng(9);
  v1::AttendBackwardRequest large = BackwardOf(ToMessage(problem, RandomInputs(problem, rng)),
                                               /*has_lse=*/false, rng);
  Backward(large);
  problem.query_length = 0;
  v1::AttendBackwardRequest request;
  *request.mutable_call() = ToMessage(problem, RandomInputs(problem, rng));
  *request.mutable_dy() = ToMessage(Tensor(DType::kFloat64, {2, 4, 0, 6}));
  const v1::AttendBackwardResponse response = Backward(request);
  EXPECT_EQ(ValuesOf(response.dk()).size(), 2u * 2 * 7 * 8);
  EXPECT_THAT(ValuesOf(response.dk()), Each(0));
  EXPECT_THAT(ValuesOf(response.dv()), Each(0));
  EXPECT_EQ(response.dq().data(), "");
}

TEST_F(AttendBackwardTest, WhatHiddenKeysContainDoesNotMatter) {
  Problem problem = SmallProblem();
  problem.batch = 1;
  problem.has_key_lengths = true;
  Rng rng(11);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.key_lengths = {4};
  const v1::AttendBackwardRequest clean = BackwardOf(ToMessage(problem, inputs), false, rng);
  for (int64_t h = 0; h < problem.kv_heads; ++h) inputs.key.Set(0, h, 5, 1, kNan);
  v1::AttendBackwardRequest dirty = clean;
  *dirty.mutable_call() = ToMessage(problem, inputs);
  const v1::AttendBackwardResponse want = Backward(clean), got = Backward(dirty);
  EXPECT_EQ(got.dq().data(), want.dq().data());
  EXPECT_EQ(got.dk().data(), want.dk().data());
  const Tensor dk = FromBytes("dk", got.dk().data(), DType::kFloat64, {1, 2, 7, 8});
  for (int64_t e = 0; e < 8; ++e) EXPECT_EQ(dk.At(0, 1, 5, e), 0) << e;
}

TEST_F(AttendBackwardTest, NamesBackendAndPlanInTheTrailers) {
  Rng rng(1);
  const Problem problem = SmallProblem();
  v1::AttendBackwardRequest request =
      BackwardOf(ToMessage(problem, RandomInputs(problem, rng)), false, rng);
  grpc::ClientContext context;
  v1::AttendBackwardResponse response;
  ASSERT_TRUE(stub_->AttendBackward(&context, request, &response).ok());
  std::map<std::string, std::string> trailers;
  for (const auto& [key, value] : context.GetServerTrailingMetadata()) {
    trailers[std::string(key.data(), key.size())] = std::string(value.data(), value.size());
  }
  EXPECT_EQ(trailers["rapt-backend"], response.backend());
  EXPECT_EQ(trailers["rapt-plan"], response.plan());
}

TEST_F(AttendBackwardTest, RejectsAnInvalidCall) {
  v1::AttendBackwardRequest request;
  *request.mutable_call()->mutable_q() = Zeros({1, 1, 3, 4});
  *request.mutable_call()->mutable_k() = Zeros({1, 1, 3, 8});
  grpc::ClientContext context;
  v1::AttendBackwardResponse response;
  const grpc::Status status = stub_->AttendBackward(&context, request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
  EXPECT_EQ(status.error_message(), "v is missing");
}

// Each takes minutes, in many tasks, and a hundred megabytes of messages and results.
v1::AttendBackwardRequest LongBackward() {
  constexpr int64_t kLength = 32768;
  v1::AttendBackwardRequest request;
  v1::AttendRequest& call = *request.mutable_call();
  for (v1::Tensor* tensor :
       {call.mutable_q(), call.mutable_k(), call.mutable_v(), request.mutable_dy()}) {
    *tensor = Zeros({1, 4, kLength, 32});
  }
  return request;
}

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
  v1::AttendBackwardRequest request;
  v1::AttendRequest& call = *request.mutable_call();
  *call.mutable_q() = *call.mutable_k() = *call.mutable_v() = *request.mutable_dy() =
      Zeros({1, 1, 220, 100});
  grpc::ClientContext context;
  v1::AttendBackwardResponse response;
  const grpc::Status status = stub->AttendBackward(&context, request, &response);
  EXPECT_EQ(status.error_code(), StatusCode::RESOURCE_EXHAUSTED) << status.error_message();
  EXPECT_THAT(status.error_message(), HasSubstr("the memory for outputs and workspace needs "));
  EXPECT_THAT(status.error_message(), HasSubstr("at most 393750 of the memory budget"));
  WaitUntilNothingIsHeld(server);
}

// --- The Open Inference Protocol -----------------------------------------------------------------

void Add(ModelInferRequest& request, const std::string& name, const v1::Tensor& tensor) {
  auto& input = *request.add_inputs();
  input.set_name(name);
  input.set_datatype(v1::DataType_Name(tensor.dtype()));
  *input.mutable_shape() = tensor.shape();
  request.add_raw_input_contents(tensor.data());
}

TEST(AttentionBackwardModelTest, EqualsAttendBackwardAndIsCounted) {
  const ServerProcess server({"--threads=2"});
  Problem problem = SmallProblem();
  problem.mask = MaskShape{DType::kFloat64, {2, 1, 5, 7}};
  problem.causal = true;
  problem.dropout = Dropout{.probability = 0.25, .seed = 42};
  Rng rng(21);
  v1::AttendBackwardRequest native;
  v1::AttendRequest& call = *native.mutable_call() = ToMessage(problem, RandomInputs(problem, rng));
  Tensor dy(DType::kFloat64, {2, 4, 5, 6});
  *native.mutable_dy() = ToMessage(dy.FillUniform(rng, -1, 1));
  for (const char* name : {"dq", "dk", "d_mask"}) native.add_gradients(name);
  grpc::ClientContext native_context;
  v1::AttendBackwardResponse want;
  grpc::Status status =
      Connect<v1::AttentionService>(server)->AttendBackward(&native_context, native, &want);
  ASSERT_TRUE(status.ok()) << status.error_message();

  ModelInferRequest request;
  request.set_model_name("attention_backward");
  Add(request, "Q", call.q());
  Add(request, "K", call.k());
  Add(request, "V", call.v());
  Add(request, "attn_mask", call.mask());
  Add(request, "dY", native.dy());
  for (const char* name : {"d_attn_mask", "dQ", "dK"}) request.add_outputs()->set_name(name);
  (*request.mutable_parameters())["is_causal"].set_bool_param(true);
  (*request.mutable_parameters())["dropout_probability"].set_double_param(0.25);
  (*request.mutable_parameters())["dropout_seed"].set_int64_param(42);
  const auto stub = Connect<inference::GRPCInferenceService>(server);
  grpc::ClientContext context;
  inference::ModelInferResponse got;
  status = stub->ModelInfer(&context, request, &got);
  ASSERT_TRUE(status.ok()) << status.error_message();
  ASSERT_EQ(got.raw_output_contents_size(), 3);
  EXPECT_EQ(got.raw_output_contents(0), want.d_mask().data());
  EXPECT_EQ(got.raw_output_contents(1), want.dq().data());
  EXPECT_EQ(got.raw_output_contents(2), want.dk().data());

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
