// LinearAttend of the real rapt-server, compared with the operator in this process.
#include <gmock/gmock.h>
#include <grpcpp/grpcpp.h>
#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "attention/mechanism/linear/linear_attention.h"
#include "proto/rapt/v1/attention.grpc.pb.h"
#include "tests/support/metrics_page.h"
#include "tests/support/rapt_messages.h"
#include "tests/support/run_operator.h"
#include "tests/support/server_process.h"

namespace rapt::test {
namespace {

using grpc::StatusCode;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr int64_t kBatch = 2, kTokens = 30, kHeads = 2, kQueryHeads = 4, kKeySize = 8,
                  kValueSize = 6;

// A request, and the same call in this process.
struct Call {
  v1::LinearAttendRequest message;
  LinearAttentionCall call;
  InputMap<std::optional<Tensor>> inputs;
};

void Add(Call& call, Slot slot, v1::Tensor& field, const Shape& shape, double low, double high,
         Rng& rng) {
  call.call.inputs[slot] = TensorSpec{DType::kFloat32, shape};
  Dims dims = {1, 1, 1, 1};
  std::copy(shape.begin(), shape.end(), dims.end() - static_cast<int64_t>(shape.size()));
  Tensor& tensor = call.inputs[slot].emplace(DType::kFloat32, dims);
  tensor.FillUniform(rng, low, high);
  field = ToMessage(tensor);
  field.mutable_shape()->Assign(shape.begin(), shape.end());
}

Call GatedDelta() {
  Call c;
  Rng rng(1);
  v1::LinearAttendRequest& m = c.message;
  Add(c, Role::kQ, *m.mutable_query(), {kBatch, kTokens, kQueryHeads * kKeySize}, -1, 1, rng);
  Add(c, Role::kK, *m.mutable_key(), {kBatch, kTokens, kHeads * kKeySize}, -0.3, 0.3, rng);
  Add(c, Role::kV, *m.mutable_value(), {kBatch, kTokens, kHeads * kValueSize}, -1, 1, rng);
  Add(c, linear::kDecay, *m.mutable_decay(), {kBatch, kTokens, kHeads}, -1, 0, rng);
  Add(c, linear::kBeta, *m.mutable_beta(), {kBatch, kTokens, 1}, 0, 1, rng);
  Add(c, linear::kPastState, *m.mutable_past_state(), {kBatch, kHeads, kKeySize, kValueSize}, -1, 1,
      rng);
  m.set_q_num_heads(kQueryHeads);
  m.set_kv_num_heads(kHeads);
  m.set_want_present_state(true);
  c.call.q_num_heads = kQueryHeads;
  c.call.kv_num_heads = kHeads;
  c.call.wants_present_state = true;
  return c;
}

// FAVOR+ with drawn directions.
Call Favor() {
  Call c;
  Rng rng(2);
  v1::LinearAttendRequest& m = c.message;
  for (const auto& [slot, field] :
       {std::pair(Role::kQ, m.mutable_query()), std::pair(Role::kK, m.mutable_key()),
        std::pair(Role::kV, m.mutable_value())}) {
    Add(c, slot, *field, {kBatch, kTokens, kHeads * kKeySize}, -1, 1, rng);
  }
  m.set_q_num_heads(kHeads);
  m.set_kv_num_heads(kHeads);
  m.set_update_rule(v1::UPDATE_LINEAR);
  m.set_feature_map(v1::FEATURE_MAP_FAVOR);
  m.set_is_causal(false);
  m.set_seed(9);
  m.set_num_features(20);
  m.set_error_rows(50);
  m.set_want_present_normalizer(true);
  c.call.q_num_heads = c.call.kv_num_heads = kHeads;
  c.call.update_rule = UpdateRule::kLinear;
  c.call.feature_map = FeatureMap::kFavor;
  c.call.is_causal = false;
  c.call.seed = 9;
  c.call.num_features = 20;
  c.call.error_rows = 50;
  c.call.wants_present_normalizer = true;
  return c;
}

// The bytes of the operator's outputs.
OutputMap<std::string> Compute(const Call& c) {
  const auto op = MakeLinearAttention(c.call).value();
  Arguments arguments;
  for (Slot slot : kInputs) {
    if (c.inputs[slot]) arguments.inputs[slot] = c.inputs[slot]->View();
  }
  OutputMap<std::string> outputs;
  for (Slot slot : kOutputs) {
    if (!op->outputs()[slot]) continue;
    outputs[slot].resize(static_cast<size_t>(ByteSize("", *op->outputs()[slot]).value()));
    arguments.outputs[slot].data = reinterpret_cast<std::byte*>(outputs[slot].data());
  }
  RunOperator(*op, arguments, {.threads = 2});
  return outputs;
}

class LinearAttendTest : public ::testing::Test {
 protected:
  static void SetUpTestSuite() { server_ = new ServerProcess({"--threads=2"}); }
  static void TearDownTestSuite() { delete server_; }

  grpc::Status Send(const v1::LinearAttendRequest& request, v1::LinearAttendResponse& response) {
    grpc::ClientContext context;
    context.set_deadline(std::chrono::system_clock::now() + std::chrono::seconds(60));
    return stub_->LinearAttend(&context, request, &response);
  }
  std::string ErrorOf(const v1::LinearAttendRequest& request) {
    v1::LinearAttendResponse response;
    const grpc::Status status = Send(request, response);
    EXPECT_EQ(status.error_code(), StatusCode::INVALID_ARGUMENT);
    return status.error_message();
  }

  static ServerProcess* server_;
  std::unique_ptr<v1::AttentionService::Stub> stub_ = v1::AttentionService::NewStub(
      grpc::CreateChannel(server_->grpc_address(), grpc::InsecureChannelCredentials()));
};
ServerProcess* LinearAttendTest::server_ = nullptr;

TEST_F(LinearAttendTest, ReturnsTheOperatorsOutputs) {
  const Call call = GatedDelta();
  v1::LinearAttendResponse response;
  const grpc::Status status = Send(call.message, response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const OutputMap<std::string> want = Compute(call);
  EXPECT_EQ(response.output().data(), want[Role::kY]);
  EXPECT_EQ(response.present_state().data(), want[linear::kPresentState]);
  EXPECT_THAT(response.output().shape(),
              ::testing::ElementsAre(kBatch, kTokens, kQueryHeads * kValueSize));
  EXPECT_EQ(response.present_state().dtype(), v1::FP32);
  EXPECT_FALSE(response.has_present_normalizer());
  EXPECT_FALSE(response.has_relative_error());
  EXPECT_EQ(response.backend(), "cpu");
  EXPECT_THAT(response.plan(), StartsWith("cpu/"));
  EXPECT_TRUE(response.has_timing());
}

TEST_F(LinearAttendTest, ReturnsWhatFavorHas) {
  const Call call = Favor();
  v1::LinearAttendResponse response;
  const grpc::Status status = Send(call.message, response);
  ASSERT_TRUE(status.ok()) << status.error_message();
  const OutputMap<std::string> want = Compute(call);
  EXPECT_EQ(response.output().data(), want[Role::kY]);
  EXPECT_EQ(response.present_normalizer().data(), want[linear::kPresentNormalizer]);
  EXPECT_EQ(response.relative_error().data(), want[linear::kRelativeError]);
  EXPECT_FALSE(response.has_present_state());
}

TEST_F(LinearAttendTest, ReadsEveryAttribute) {
  struct {
    const char* name;
    void (*change)(Call&);
  } const kCases[] = {
      {"scale",
       [](Call& c) {
         c.message.set_scale(0.5);
         c.call.scale = 0.5;
       }},
      {"chunk_size",
       [](Call& c) {
         c.message.set_chunk_size(5);
         c.call.chunk_size = 5;
       }},
      {"linear",
       [](Call& c) {
         c.message.clear_decay(), c.message.clear_beta();
         c.message.set_update_rule(v1::UPDATE_LINEAR);
         c.inputs[linear::kDecay].reset(), c.inputs[linear::kBeta].reset();
         c.call.inputs[linear::kDecay].reset(), c.call.inputs[linear::kBeta].reset();
         c.call.update_rule = UpdateRule::kLinear;
       }},
      {"gated",
       [](Call& c) {
         c.message.clear_beta();
         c.message.set_update_rule(v1::UPDATE_GATED);
         c.inputs[linear::kBeta].reset(), c.call.inputs[linear::kBeta].reset();
         c.call.update_rule = UpdateRule::kGated;
       }},
      {"delta",
       [](Call& c) {
         c.message.clear_decay();
         c.message.set_update_rule(v1::UPDATE_DELTA);
         c.inputs[linear::kDecay].reset(), c.call.inputs[linear::kDecay].reset();
         c.call.update_rule = UpdateRule::kDelta;
       }},
      {"feature_map",
       [](Call& c) {
         c.message.set_feature_map(v1::FEATURE_MAP_RELU);
         c.call.feature_map = FeatureMap::kRelu;
       }},
      {"state_type",
       [](Call& c) {
         c.message.set_state_type(v1::BF16);
         c.call.state_type = DType::kBFloat16;
       }},
  };
  for (const auto& [name, change] : kCases) {
    SCOPED_TRACE(name);
    Call call = GatedDelta();
    const std::string before = Compute(call)[linear::kPresentState] + Compute(call)[Role::kY];
    change(call);
    v1::LinearAttendResponse response;
    const grpc::Status status = Send(call.message, response);
    ASSERT_TRUE(status.ok()) << status.error_message();
    const OutputMap<std::string> want = Compute(call);
    EXPECT_EQ(response.output().data(), want[Role::kY]);
    EXPECT_EQ(response.present_state().data(), want[linear::kPresentState]);
    EXPECT_NE(want[linear::kPresentState] + want[Role::kY], before);
  }
}

TEST_F(LinearAttendTest, LeavesPaddingOut) {
  Call call = GatedDelta();
  call.message.add_nonpad_kv_seqlen(0);
  call.message.add_nonpad_kv_seqlen(kTokens);
  v1::LinearAttendResponse response;
  ASSERT_TRUE(Send(call.message, response).ok());
  const size_t half = response.present_state().data().size() / 2;
  EXPECT_EQ(response.present_state().data().substr(0, half),
            call.message.past_state().data().substr(0, half));
  EXPECT_EQ(response.present_state().data().substr(half),
            Compute(call)[linear::kPresentState].substr(half));
}

TEST_F(LinearAttendTest, NamesTheInvalidField) {
  struct {
    const char* message;
    void (*change)(v1::LinearAttendRequest&);
  } const kCases[] = {
      {"query is missing", [](v1::LinearAttendRequest& r) { r.clear_query(); }},
      {"beta is missing; update_rule is gated_delta",
       [](v1::LinearAttendRequest& r) { r.clear_beta(); }},
      {"decay has dtype INT32; it must be FP32, FP16, BF16 or FP64",
       [](v1::LinearAttendRequest& r) { r.mutable_decay()->set_dtype(v1::INT32); }},
      {"past_state has 10 bytes of data; its shape",
       [](v1::LinearAttendRequest& r) { r.mutable_past_state()->mutable_data()->resize(10); }},
      {"update_rule is 7; it must be UPDATE_GATED_DELTA (0)",
       [](v1::LinearAttendRequest& r) { r.set_update_rule(static_cast<v1::UpdateRule>(7)); }},
      {"feature_map is 9; it must be FEATURE_MAP_NONE (0)",
       [](v1::LinearAttendRequest& r) { r.set_feature_map(static_cast<v1::FeatureMap>(9)); }},
      {"state_type is INT8; it must be FP32",
       [](v1::LinearAttendRequest& r) { r.set_state_type(v1::INT8); }},
      {"seed is given; it needs feature_map favor",
       [](v1::LinearAttendRequest& r) { r.set_seed(0); }},
      {"normalize is true; with it, update_rule must be linear",
       [](v1::LinearAttendRequest& r) { r.set_normalize(true); }},
      {"nonpad_kv_seqlen has shape [1]; it must be [2]",
       [](v1::LinearAttendRequest& r) { r.add_nonpad_kv_seqlen(1); }},
      {"nonpad_kv_seqlen[1] is -1; it must be from 0 to the length 30",
       [](v1::LinearAttendRequest& r) {
         r.add_nonpad_kv_seqlen(1);
         r.add_nonpad_kv_seqlen(-1);
       }},
  };
  for (const auto& c : kCases) {
    v1::LinearAttendRequest request = GatedDelta().message;
    c.change(request);
    EXPECT_THAT(ErrorOf(request), HasSubstr(c.message));
  }
}

// A decode step at the end of a prefill continues it.
TEST_F(LinearAttendTest, AStateContinuesTheCall) {
  Call all = GatedDelta();
  v1::LinearAttendResponse whole;
  ASSERT_TRUE(Send(all.message, whole).ok());
  v1::LinearAttendRequest request = all.message;
  v1::LinearAttendResponse last;
  for (const auto& [begin, count] : {std::pair<int64_t, int64_t>(0, 29), {29, 1}}) {
    for (const auto& [slot, field] : {std::pair(Slot(Role::kQ), request.mutable_query()),
                                      std::pair(Slot(Role::kK), request.mutable_key()),
                                      std::pair(Slot(Role::kV), request.mutable_value()),
                                      std::pair(linear::kDecay, request.mutable_decay()),
                                      std::pair(linear::kBeta, request.mutable_beta())}) {
      const int64_t width = field->shape(2);
      *field = ToMessage(SliceAxis(*all.inputs[slot], 2, begin, count));
      const Shape shape = {kBatch, count, width};
      field->mutable_shape()->Assign(shape.begin(), shape.end());
    }
    if (begin > 0) *request.mutable_past_state() = last.present_state();
    last.Clear();
    const grpc::Status status = Send(request, last);
    ASSERT_TRUE(status.ok()) << status.error_message();
  }
  const Tensor got = FromBytes("present_state", last.present_state().data(), DType::kFloat32,
                               {kBatch, kHeads, kKeySize, kValueSize});
  const Tensor want = FromBytes("present_state", whole.present_state().data(), DType::kFloat32,
                                {kBatch, kHeads, kKeySize, kValueSize});
  EXPECT_TRUE(AllClose("present_state", got, want.ToVector(), {1e-5, {}}));
}

}  // namespace
}  // namespace rapt::test
