#include "server/protocols/oip/session.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "proto/inference/grpc_service.pb.h"
#include "server/cache/reason.h"
#include "server/protocols/oip/codec.h"
#include "tests/support/wire_message.h"

namespace rapt::oip {
namespace {

using inference::ModelInferRequest;
using test::WireMessage;
using ::testing::HasSubstr;

constexpr ModelContext kSequences = {.sequence_lease = std::chrono::minutes(10)};

// Adds an input whose elements are `first`, `first` + 1 and so on.
void Add(ModelInferRequest& message, const std::string& name, const std::vector<int64_t>& shape,
         float first = 0) {
  auto& input = *message.add_inputs();
  input.set_name(name);
  input.set_datatype("FP32");
  input.mutable_shape()->Assign(shape.begin(), shape.end());
  std::vector<float> values(
      std::accumulate(shape.begin(), shape.end(), size_t{1}, std::multiplies<>()));
  std::iota(values.begin(), values.end(), first);
  message.add_raw_input_contents(values.data(), values.size() * sizeof(float));
}

inference::InferParameter& Parameter(ModelInferRequest& message, const std::string& name) {
  return (*message.mutable_parameters())[name];
}

// A step of one token and one row, with two heads of two elements.
ModelInferRequest Step() {
  ModelInferRequest message;
  message.set_model_name("attention_session");
  Parameter(message, "sequence_id").set_int64_param(5);
  for (const char* name : {"Q", "K", "V"}) Add(message, name, {1, 2, 1, 2});
  return message;
}

// The call, whose tensors are gone.
absl::StatusOr<SessionCall> Decode(const ModelInferRequest& message) {
  const SharedMemory none({});
  absl::StatusOr<DecodedInfer> decoded = DecodeInfer(
      WireMessage(message.SerializeAsString()).bytes(), Instant(), none, nullptr, kSequences);
  if (!decoded.ok()) return decoded.status();
  return std::move(*decoded->session);
}

std::string ErrorOf(const ModelInferRequest& message) {
  const absl::Status status = Decode(message).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  return std::string(status.message());
}

TEST(SessionTest, NeedsAServerWithSequences) {
  const SharedMemory none({});
  const std::string message = Step().SerializeAsString();
  const absl::Status status = DecodeInfer(WireMessage(message).bytes(), Instant(), none).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(status.message()), HasSubstr("unknown model 'attention_session'"));
}

TEST(SessionTest, ReadsIdsAsTritonDoes) {
  ModelInferRequest message = Step();
  inference::InferParameter& id = Parameter(message, "sequence_id");
  EXPECT_EQ(Decode(message)->sequence.id, cache::SequenceId(uint64_t{5}));
  id.set_uint64_param(std::numeric_limits<uint64_t>::max());
  EXPECT_EQ(Decode(message)->sequence.id, cache::SequenceId(std::numeric_limits<uint64_t>::max()));
  id.set_int64_param(-1);
  EXPECT_EQ(Decode(message)->sequence.id, cache::SequenceId(std::numeric_limits<uint64_t>::max()));
  id.set_string_param("5");
  EXPECT_EQ(Decode(message)->sequence.id, cache::SequenceId("5"));
  id.set_string_param(std::string(128, 'x'));
  EXPECT_TRUE(Decode(message).ok());
}

TEST(SessionTest, RefusesIdsThatAreNone) {
  const std::string none =
      "inference request to model 'attention_session' must specify a non-zero or non-empty "
      "correlation ID";
  ModelInferRequest message = Step();
  inference::InferParameter& id = Parameter(message, "sequence_id");
  id.set_int64_param(0);
  EXPECT_EQ(ErrorOf(message), none);
  id.set_string_param("");
  EXPECT_EQ(ErrorOf(message), none);
  id.set_string_param(std::string(129, 'x'));
  EXPECT_THAT(ErrorOf(message), HasSubstr("parameter sequence_id"));
  id.set_double_param(5);
  EXPECT_THAT(ErrorOf(message), HasSubstr("parameter sequence_id is 5"));
  message.mutable_parameters()->clear();
  EXPECT_EQ(ErrorOf(message), none);
}

TEST(SessionTest, ReadsParameters) {
  ModelInferRequest message = Step();
  Parameter(message, "sequence_start").set_bool_param(true);
  Parameter(message, "sequence_end").set_bool_param(true);
  Parameter(message, "layer").set_int64_param(2);
  Parameter(message, "layers").set_string_param("3");
  Parameter(message, "position").set_int64_param(7);
  Parameter(message, "scale").set_double_param(0.5);
  Parameter(message, "softcap").set_double_param(20);
  const absl::StatusOr<SessionCall> call = Decode(message);
  ASSERT_TRUE(call.ok()) << call.status();
  EXPECT_TRUE(call->sequence.starts && call->sequence.ends);
  EXPECT_EQ(call->attend.scale, 0.5);
  EXPECT_EQ(call->attend.softcap, 20);
  const cache::LayerCall& layer = call->attend.items.front().call;
  EXPECT_EQ(layer.layer, 2);
  EXPECT_EQ(layer.at, 7);
  EXPECT_EQ(layer.count, 1);
  const cache::TokenShape token = {.kv_heads = 2, .head_size = 2, .value_head_size = 2};
  EXPECT_EQ(call->sequence.spec.shapes,
            (std::vector<cache::LayerShape>{{.layers = 3, .token = token}}));
}

// As ONNX's operator has it; false would be another result.
TEST(SessionTest, IsCausalMayBeSaid) {
  ModelInferRequest message = Step();
  Parameter(message, "is_causal").set_int64_param(1);
  EXPECT_TRUE(Decode(message).ok());
  Parameter(message, "is_causal").set_bool_param(false);
  EXPECT_THAT(ErrorOf(message), HasSubstr("parameter is_causal is false; it must be true"));
}

TEST(SessionTest, TensorsAreReadInPlace) {
  ModelInferRequest message = Step();
  message.clear_inputs();
  message.clear_raw_input_contents();
  Add(message, "K", {1, 2, 3, 2});
  Add(message, "V", {1, 3, 8});
  Parameter(message, "kv_num_heads").set_int64_param(2);
  const SharedMemory none({});
  const WireMessage sent(message.SerializeAsString());
  absl::StatusOr<DecodedInfer> decoded =
      DecodeInfer(sent.bytes(), Instant(), none, nullptr, kSequences);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const cache::AttendCall& attend = decoded->session->attend;
  EXPECT_EQ(attend.k.spec->shape, (Shape{3, 2, 2}));
  EXPECT_EQ(attend.v.spec->shape, (Shape{3, 2, 4}));
  EXPECT_TRUE(attend.k.heads_first);
  EXPECT_FALSE(attend.v.heads_first);
  EXPECT_TRUE(sent.Contains(attend.k.bytes.data));
  EXPECT_TRUE(sent.Contains(attend.v.bytes.data));
  EXPECT_FALSE(attend.q.spec.has_value());
  EXPECT_TRUE(decoded->outputs.empty());
}

TEST(SessionTest, AnEndAloneHasNoPosition) {
  ModelInferRequest message = Step();
  message.clear_inputs();
  message.clear_raw_input_contents();
  Parameter(message, "sequence_end").set_bool_param(true);
  EXPECT_TRUE(Decode(message)->is_empty());
  Parameter(message, "position").set_int64_param(-7);
  EXPECT_EQ(ErrorOf(message), "parameter position is -7; it is allowed with inputs only");
}

TEST(SessionTest, OutputsHaveTheLayoutOfQ) {
  SessionCall call;
  call.attend.q.heads_first = true;
  const TensorSpec heads_first = {DType::kFloat16, {2, 3, 8}};
  EXPECT_EQ(SessionOutput(call, Role::kY, heads_first).shape, (Shape{1, 2, 3, 8}));
  call.attend.q.heads_first = false;
  const TensorSpec rows_first = {DType::kFloat16, {3, 2, 8}};
  EXPECT_EQ(SessionOutput(call, Role::kY, rows_first).shape, (Shape{1, 3, 16}));
  EXPECT_EQ(SessionOutput(call, Role::kY, rows_first).dtype, DType::kFloat16);
  EXPECT_EQ(SessionOutput(call, Role::kLse, {DType::kFloat32, {2, 3}}).shape, (Shape{1, 2, 3}));
}

TEST(SessionTest, ErrorsAreThoseOfTheOnlyItem) {
  EXPECT_TRUE(SessionError(absl::OkStatus(), "m", "x").ok());
  const absl::Status gone = SessionError(
      cache::Fail(cache::Reason::kExpired, absl::StatusCode::kNotFound, "gone"), "m", "x");
  EXPECT_EQ(gone.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(gone.message(),
            "inference request for sequence x to model 'm' must specify the START flag"
            " on the first request of the sequence");
  const absl::Status region = absl::NotFoundError("no region");
  EXPECT_EQ(SessionError(region, "m", "x"), region);
  const absl::Status conflict =
      SessionError(cache::Fail(cache::Reason::kConflict, absl::StatusCode::kAborted,
                               "items[0]: at is 3 and 2 tokens come"),
                   "m", uint64_t{5});
  EXPECT_EQ(conflict.code(), absl::StatusCode::kAborted);
  EXPECT_EQ(conflict.message(), "parameter position is 3 and 2 tokens come");
  EXPECT_EQ(cache::ReasonOf(conflict), cache::Reason::kConflict);
}

}  // namespace
}  // namespace rapt::oip
