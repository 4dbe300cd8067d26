#include "server/protocols/oip/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <functional>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "attention/attributes.h"
#include "proto/inference/grpc_service.pb.h"
#include "server/calls/per_model.h"
#include "tests/support/shared_object.h"
#include "tests/support/wire_message.h"

namespace rapt::oip {
namespace {

using inference::ModelInferRequest;
using std::chrono::microseconds;
using test::Gather;
using test::Share;
using test::WireMessage;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr Instant kNow{std::chrono::hours(1)};

// Shared memory that is not allowed.
const SharedMemory kNoSharedMemory({});

int64_t SizeOf(const std::vector<int64_t>& shape) {
  return std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
}

ModelInferRequest::InferInputTensor& AddInput(ModelInferRequest& message, const std::string& name,
                                              const std::string& datatype,
                                              const std::vector<int64_t>& shape) {
  auto& input = *message.add_inputs();
  input.set_name(name);
  input.set_datatype(datatype);
  input.mutable_shape()->Assign(shape.begin(), shape.end());
  return input;
}

void AddRaw(ModelInferRequest& message, const std::string& name, const std::string& datatype,
            const std::vector<int64_t>& shape, size_t element_bytes = 4) {
  AddInput(message, name, datatype, shape);
  message.add_raw_input_contents(std::string(SizeOf(shape) * element_bytes, '\0'));
}

// Q, K and V of one head, three positions, four elements.
ModelInferRequest RawMessage() {
  ModelInferRequest message;
  message.set_model_name("attention");
  for (const char* name : {"Q", "K", "V"}) AddRaw(message, name, "FP32", {1, 1, 3, 4});
  return message;
}

ModelInferRequest TypedMessage() {
  ModelInferRequest message;
  message.set_model_name("attention");
  float value = 0;
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = AddInput(message, name, "FP32", {1, 1, 3, 4});
    for (int i = 0; i < 12; ++i) input.mutable_contents()->add_fp32_contents(value++);
  }
  return message;
}

// Only results that do not point into the message stay valid.
absl::StatusOr<DecodedInfer> DecodeInfer(const ModelInferRequest& message, Instant now) {
  return oip::DecodeInfer(WireMessage(message.SerializeAsString()).bytes(), now, kNoSharedMemory);
}

Problem DecodedProblem(const ModelInferRequest& message) {
  const absl::StatusOr<DecodedInfer> decoded = DecodeInfer(message, kNow);
  EXPECT_TRUE(decoded.ok()) << decoded.status();
  return decoded.ok() ? decoded->request.call.problem : Problem{};
}

inference::InferParameter& Parameter(ModelInferRequest& message, const std::string& name) {
  return (*message.mutable_parameters())[name];
}

// Distinct bytes for the inputs.
ModelInferRequest DistinctMessage() {
  ModelInferRequest message = RawMessage();
  for (int n = 0; n < 3; ++n) message.set_raw_input_contents(n, std::string(48, "QKV"[n]));
  return message;
}

TEST(OipCodecTest, ReadsRawTensorsInPlace) {
  const WireMessage message(DistinctMessage().SerializeAsString());
  const absl::StatusOr<DecodedInfer> decoded =
      oip::DecodeInfer(message.bytes(), kNow, kNoSharedMemory);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const auto& inputs = decoded->request.inputs;
  for (const InputBytes* input : {&inputs[Role::kQ], &inputs[Role::kK], &inputs[Role::kV]}) {
    EXPECT_TRUE(message.Contains(input->data));
  }
  EXPECT_EQ(Gather(inputs[Role::kQ]), std::string(48, 'Q'));
  EXPECT_EQ(Gather(inputs[Role::kK]), std::string(48, 'K'));
  EXPECT_EQ(Gather(inputs[Role::kV]), std::string(48, 'V'));
  EXPECT_FALSE(inputs[Role::kMask].present());
  EXPECT_FALSE(inputs[Role::kPastKey].present());
}

TEST(OipCodecTest, LeavesTensorsInTheirSlices) {
  const WireMessage message(DistinctMessage().SerializeAsString(), 20);
  const absl::StatusOr<DecodedInfer> decoded =
      oip::DecodeInfer(message.bytes(), kNow, kNoSharedMemory);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_TRUE(decoded->request.inputs[Role::kK].in_slices());
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kK]), std::string(48, 'K'));
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kV]), std::string(48, 'V'));
}

TEST(OipCodecTest, ReadsTypedTensors) {
  const ModelInferRequest message = TypedMessage();
  const absl::StatusOr<DecodedInfer> decoded = DecodeInfer(message, kNow);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const auto& values = message.inputs(2).contents().fp32_contents();
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kV]),
            std::string(reinterpret_cast<const char*>(values.data()), 48));
}

// Three tensors of 32 KiB: too large to be parsed by generated code.
ModelInferRequest LargeTypedMessage() {
  ModelInferRequest message;
  message.set_model_name("attention");
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = AddInput(message, name, "FP32", {1, 1, 128, 64});
    for (int i = 0; i < 128 * 64; ++i) {
      input.mutable_contents()->add_fp32_contents(static_cast<float>(i) * name[0]);
    }
  }
  return message;
}

TEST(OipCodecTest, ReadsLargeTypedTensorsInPlace) {
  const ModelInferRequest typed = LargeTypedMessage();
  const WireMessage message(typed.SerializeAsString());
  const absl::StatusOr<DecodedInfer> decoded =
      oip::DecodeInfer(message.bytes(), kNow, kNoSharedMemory);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_TRUE(message.Contains(decoded->request.inputs[Role::kV].data));
  const auto& values = typed.inputs(2).contents().fp32_contents();
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kV]),
            std::string(reinterpret_cast<const char*>(values.data()), 4 * values.size()));
}

TEST(OipCodecTest, LargeTypedTensorsAreCheckedLikeSmallOnes) {
  ModelInferRequest message = LargeTypedMessage();
  message.mutable_inputs(1)->mutable_contents()->mutable_fp32_contents()->RemoveLast();
  EXPECT_THAT(std::string(DecodeInfer(message, kNow).status().message()),
              HasSubstr("input K has 8191 values in fp32_contents"));
  message = LargeTypedMessage();
  message.mutable_inputs(1)->set_datatype("FP64");
  EXPECT_THAT(std::string(DecodeInfer(message, kNow).status().message()),
              HasSubstr("must be in fp64_contents alone"));
}

TEST(OipCodecTest, ReadsKeyLengthsAndLargeTypedTensors) {
  ModelInferRequest message = LargeTypedMessage();
  auto& lengths = AddInput(message, "nonpad_kv_seqlen", "INT64", {1});
  lengths.mutable_contents()->add_int64_contents(77);
  const absl::StatusOr<DecodedInfer> decoded = DecodeInfer(message, kNow);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(decoded->request.key_lengths, std::vector<int64_t>{77});
}

TEST(OipCodecTest, RejectsContentsWhoseOrderIsLost) {
  // A mask with one unpacked value, the others packed.
  ModelInferRequest more;
  auto& input = AddInput(more, "attn_mask", "BOOL", {3, 3});
  for (int i = 0; i < 8; ++i) input.mutable_contents()->add_bool_contents(true);
  std::string single;
  wire::AppendFieldHeader(5, 2, single);  // InferInputTensor.contents, of one unpacked bool
  single += std::string("\x08\x01", 2);
  std::string tensor = more.inputs(0).SerializeAsString() + single;
  std::string bytes = TypedMessage().SerializeAsString();
  wire::AppendFieldHeader(5, static_cast<int64_t>(tensor.size()),
                          bytes);  // ModelInferRequest.inputs
  const WireMessage message(bytes + tensor);
  EXPECT_THAT(
      std::string(oip::DecodeInfer(message.bytes(), kNow, kNoSharedMemory).status().message()),
      HasSubstr("partly packed"));
}

TEST(OipCodecTest, AcceptsSmallTypedTensorsInSeveralPieces) {
  const std::string whole = TypedMessage().SerializeAsString();
  ModelInferRequest more;
  auto& input = AddInput(more, "attn_mask", "BOOL", {3, 3});
  for (int i = 0; i < 9; ++i) input.mutable_contents()->add_bool_contents(i % 2 == 0);
  const WireMessage message(whole + more.SerializeAsString(), 7);
  const absl::StatusOr<DecodedInfer> decoded =
      oip::DecodeInfer(message.bytes(), kNow, kNoSharedMemory);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kMask]), std::string("\1\0\1\0\1\0\1\0\1", 9));
}

TEST(OipCodecTest, RejectsExcessiveStructure) {
  ModelInferRequest message = RawMessage();
  message.set_id(std::string(70'000, 'x'));
  EXPECT_THAT(std::string(DecodeInfer(message, kNow).status().message()),
              HasSubstr("larger than the allowed 65536 bytes"));
  message = RawMessage();
  for (int i = 0; i < 100; ++i) message.add_raw_input_contents();
  EXPECT_THAT(std::string(DecodeInfer(message, kNow).status().message()),
              HasSubstr("more than the allowed 64 tensors"));
}

TEST(OipCodecTest, MasksOfZeroAndOneBecomeBool) {
  for (const char* datatype : {"INT8", "UINT8", "INT32", "INT64"}) {
    SCOPED_TRACE(datatype);
    const size_t bytes = static_cast<size_t>(SizeOf(*DTypeNamed(datatype)));
    ModelInferRequest message = RawMessage();
    AddRaw(message, "attn_mask", datatype, {3, 3}, bytes);
    std::string& data = *message.mutable_raw_input_contents(3);
    data.assign(9 * bytes, '\0');
    data[5 * bytes] = 1;  // little-endian
    std::string bools(9, 'x');
    const auto convert = [&] {
      const WireMessage wire(message.SerializeAsString());
      auto decoded = oip::DecodeInfer(wire.bytes(), kNow, kNoSharedMemory);
      if (!decoded.ok()) return decoded.status();
      EXPECT_EQ(decoded->request.call.problem.mask->dtype, DType::kBool);
      return decoded->request.write_mask(
          {reinterpret_cast<std::byte*>(bools.data()), bools.size()});
    };
    EXPECT_EQ(convert(), absl::OkStatus());
    EXPECT_EQ(bools, std::string("\0\0\0\0\0\1\0\0\0", 9));
    data[7 * bytes] = 2;
    EXPECT_EQ(convert().message(), absl::StrCat("input attn_mask[2, 1] is 2; ", datatype,
                                                " masks hold only 0 (hidden) and 1 (visible)"));
  }
}

TEST(OipCodecTest, AcceptsTypedDoublesAndBools) {
  ModelInferRequest message;
  message.set_model_name("attention");
  for (const char* name : {"Q", "K", "V"}) {
    auto& input = AddInput(message, name, "FP64", {1, 1, 1, 2});
    input.mutable_contents()->add_fp64_contents(1);
    input.mutable_contents()->add_fp64_contents(2);
  }
  AddInput(message, "attn_mask", "BOOL", {1}).mutable_contents()->add_bool_contents(true);
  EXPECT_EQ(DecodedProblem(message).dtype, DType::kFloat64);
}

TEST(OipCodecTest, AcceptsEmptyTensorsWithoutContents) {
  ModelInferRequest message;
  message.set_model_name("attention");
  for (const char* name : {"Q", "K", "V"}) AddInput(message, name, "FP32", {0, 1, 3, 4});
  EXPECT_TRUE(DecodedProblem(message).empty());
}

TEST(OipCodecTest, ReadsNumbersFromStringsAndOtherIntegers) {
  ModelInferRequest message = RawMessage();
  Parameter(message, "scale").set_string_param("0.25");
  Parameter(message, "softcap").set_int64_param(30);
  Parameter(message, "left_window_size").set_string_param("5");
  Parameter(message, "right_window_size").set_uint64_param(6);
  Parameter(message, "is_causal").set_int64_param(1);
  Parameter(message, "dropout_seed").set_string_param("18446744073709551614");
  const Problem problem = DecodedProblem(message);
  EXPECT_EQ(problem.scale, 0.25);
  EXPECT_EQ(problem.softcap, 30);
  EXPECT_EQ(problem.left_window, 5);
  EXPECT_EQ(problem.right_window, 6);
  EXPECT_TRUE(problem.causal);
  EXPECT_EQ(problem.dropout->seed, ~uint64_t{1});
}

TEST(OipCodecTest, IgnoresReservedParameters) {
  ModelInferRequest message = RawMessage();
  Parameter(message, "sequence_id").set_string_param("a");
  Parameter(message, "sequence_start").set_bool_param(true);
  Parameter(message, "sequence_end").set_bool_param(true);
  Parameter(message, "headers").set_string_param("x");
  Parameter(message, "content_type").set_string_param("np");
  Parameter(message, "binary_data_output").set_bool_param(true);
  Parameter(message, "triton_enable_empty_final_response").set_bool_param(true);
  EXPECT_TRUE(DecodeInfer(message, kNow).ok());
}

// KServe's client leaves binary_data_size beside raw contents.
TEST(OipCodecTest, IgnoresParametersOfTensorsThatClientsAdd) {
  for (ModelInferRequest message : {RawMessage(), TypedMessage()}) {
    auto& of_input = *message.mutable_inputs(0)->mutable_parameters();
    of_input["binary_data_size"].set_int64_param(1);
    of_input["content_type"].set_string_param("np");
    of_input["without_value"];
    auto& output = *message.add_outputs();
    output.set_name("Y");
    (*output.mutable_parameters())["binary_data"].set_bool_param(true);
    EXPECT_TRUE(DecodeInfer(message, kNow).ok());
  }
}

// Returns the names that the error for an unknown parameter lists.
std::string ParametersOf(const std::string& model) {
  ModelInferRequest message;
  message.set_model_name(model);
  Parameter(message, "is_casual").set_bool_param(true);
  const std::string error(DecodeInfer(message, kNow).status().message());
  const std::string begin = "unknown request parameter is_casual; the parameters are ";
  EXPECT_EQ(error.substr(0, begin.size()), begin);
  return error.substr(std::min(begin.size(), error.size()));
}

TEST(OipCodecTest, AnUnknownParameterIsToldThoseThatThereAre) {
  EXPECT_EQ(ParametersOf("positional_encoding"), "base, timeout, priority");
  EXPECT_EQ(ParametersOf("rotary_embedding"),
            "interleaved, num_heads, rotary_embedding_dim, rope_theta, timeout, priority");
  const std::string attention = ParametersOf("attention");
  for (const AttributeInfo& attribute : Attributes()) {
    EXPECT_THAT(attention, HasSubstr(std::string(attribute.onnx)));
  }
  EXPECT_THAT(
      attention,
      HasSubstr("softmax_precision, dropout_probability, dropout_seed, qk_matmul_output_mode"));
  EXPECT_THAT(ParametersOf("attention_backward"), Not(HasSubstr("qk_matmul_output_mode")));
}

// Returns the model that a failed call counts for.
std::string ReportedFor(const std::string& message) {
  ModelId reported = OtherModels();
  const absl::Status status =
      oip::DecodeInfer(WireMessage(message).bytes(), kNow, kNoSharedMemory, &reported).status();
  EXPECT_FALSE(status.ok());
  return std::string(reported.name());
}

TEST(OipCodecTest, CallsOfNoModelCountAsOthers) {
  ModelInferRequest message = RawMessage();
  message.clear_inputs();
  EXPECT_EQ(ReportedFor(message.SerializeAsString()), "attention");
  message.set_model_name("none");
  EXPECT_EQ(ReportedFor(message.SerializeAsString()), kOtherModels);
  EXPECT_EQ(ReportedFor("no message"), kOtherModels);
}

// Clients of Triton read the responses to a request until one says that it is the last.
TEST(OipCodecTest, AResponseInAStreamIsTheLastOfItsRequest) {
  ModelInferRequest message = RawMessage();
  message.set_id("7");
  const absl::StatusOr<DecodedInfer> decoded = DecodeInfer(message, kNow);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const std::string y(48, '\0');
  Result result;
  result.outputs[Role::kY].bytes = {reinterpret_cast<const std::byte*>(y.data()), y.size()};
  inference::ModelStreamInferResponse streamed, failed;
  ASSERT_TRUE(streamed.ParseFromString(Gather(EncodeStreamInfer(*decoded, result))));
  ASSERT_TRUE(failed.ParseFromString(Gather(EncodeStreamError("7", absl::InternalError("x")))));
  for (const auto* response : {&streamed.infer_response(), &failed.infer_response()}) {
    EXPECT_EQ(response->id(), "7");
    ASSERT_EQ(response->parameters().count("triton_final_response"), 1u);
    EXPECT_TRUE(response->parameters().at("triton_final_response").bool_param());
  }
  inference::ModelInferResponse alone;
  ASSERT_TRUE(alone.ParseFromString(Gather(EncodeInfer(*decoded, result))));
  EXPECT_TRUE(alone.parameters().empty());
}

TEST(OipCodecTest, TheTimeoutCountsFromTheArrival) {
  ModelInferRequest message = RawMessage();
  EXPECT_EQ(DecodeInfer(message, kNow)->request.deadline, Instant::max());
  Parameter(message, "timeout").set_int64_param(1500);
  EXPECT_EQ(DecodeInfer(message, kNow)->request.deadline, kNow + microseconds(1500));
  Parameter(message, "timeout").set_int64_param(std::numeric_limits<int64_t>::max());
  EXPECT_EQ(DecodeInfer(message, kNow)->request.deadline, Instant::max());
}

TEST(OipCodecTest, ReadsThePriority) {
  ModelInferRequest message = RawMessage();
  Parameter(message, "priority").set_uint64_param(1);
  EXPECT_EQ(DecodeInfer(message, kNow)->request.priority, 1u);
}

TEST(OipCodecTest, OutputsAreInTheRequestedOrder) {
  ModelInferRequest message = RawMessage();
  for (const char* name : {"lse", "present_value", "Y"}) message.add_outputs()->set_name(name);
  const absl::StatusOr<DecodedInfer> decoded = DecodeInfer(message, kNow);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  ASSERT_EQ(decoded->outputs.size(), 3u);
  EXPECT_EQ(decoded->outputs[0].slot, Role::kLse);
  EXPECT_EQ(decoded->outputs[1].slot, Role::kPresentValue);
  EXPECT_EQ(decoded->outputs[2].slot, Role::kY);
  EXPECT_TRUE(decoded->request.call.problem.wants_lse);
  EXPECT_TRUE(decoded->request.call.problem.wants_present);
  EXPECT_FALSE(decoded->request.call.problem.score_output.has_value());
}

// A backward pass of RawMessage().
ModelInferRequest BackwardMessage() {
  ModelInferRequest message = RawMessage();
  message.set_model_name("attention_backward");
  AddRaw(message, "dY", "FP32", {1, 1, 3, 4});
  return message;
}

std::vector<Role> RolesOf(const std::vector<RequestedOutput>& outputs) {
  std::vector<Role> roles;
  for (const RequestedOutput& output : outputs) roles.push_back(output.slot.role());
  return roles;
}

TEST(OipBackwardCodecTest, ReturnsTheRequestedGradientsInTheirOrder) {
  ModelInferRequest message = BackwardMessage();
  AddRaw(message, "attn_mask", "FP16", {3, 1}, 2);
  AddRaw(message, "head_sink", "FP32", {1});
  for (const char* name : {"d_head_sink", "d_attn_mask", "dK"}) {
    message.add_outputs()->set_name(name);
  }
  const absl::StatusOr<DecodedInfer> decoded = DecodeInfer(message, kNow);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_THAT(RolesOf(decoded->outputs), ElementsAre(Role::kDHeadSink, Role::kDMask, Role::kDK));
  EXPECT_EQ(decoded->outputs[1].spec.dtype, DType::kFloat16);
  EXPECT_THAT(decoded->outputs[1].spec.shape, ElementsAre(3, 1));
  Result result;
  const std::string zeros(64, '\0');
  for (const auto& [role, size] : {std::pair(Role::kDHeadSink, 4), {Role::kDMask, 6}}) {
    result.outputs[role].bytes = {reinterpret_cast<const std::byte*>(zeros.data()),
                                  static_cast<size_t>(size)};
  }
  inference::ModelInferResponse response;
  ASSERT_TRUE(response.ParseFromString(Gather(EncodeInfer(*decoded, result))));
  EXPECT_EQ(response.model_name(), "attention_backward");
  ASSERT_EQ(response.outputs_size(), 3);
  EXPECT_EQ(response.outputs(0).name(), "d_head_sink");
  EXPECT_EQ(response.outputs(1).datatype(), "FP16");
  EXPECT_EQ(response.raw_output_contents(1).size(), 6);
}

TEST(OipCodecTest, EncodesTheRequestedOutputsRaw) {
  DecodedInfer asked;
  asked.id = "7f";
  const std::vector<float> y = {1, 2, 3, 4, 5, 6};
  const std::vector<float> lse = {7, 8};
  const auto bytes_of = [](const std::vector<float>& values) {
    return absl::MakeConstSpan(reinterpret_cast<const std::byte*>(values.data()),
                               values.size() * sizeof(float));
  };
  Result result;
  result.outputs[Role::kY].bytes = bytes_of(y);
  result.outputs[Role::kLse].bytes = bytes_of(lse);
  asked.outputs = {
      {"lse", Role::kLse, {DType::kFloat32, {1, 1, 2}}},
      {"Y", Role::kY, {DType::kFloat32, {1, 1, 2, 3}}},
  };
  inference::ModelInferResponse response;
  ASSERT_TRUE(response.ParseFromString(Gather(EncodeInfer(asked, result))));
  EXPECT_EQ(response.model_name(), "attention");
  EXPECT_EQ(response.model_version(), "1");
  EXPECT_EQ(response.id(), "7f");
  ASSERT_EQ(response.outputs_size(), 2);
  EXPECT_EQ(response.outputs(0).name(), "lse");
  EXPECT_THAT(response.outputs(0).shape(), ElementsAre(1, 1, 2));
  EXPECT_EQ(response.outputs(1).datatype(), "FP32");
  EXPECT_FALSE(response.outputs(1).has_contents());
  ASSERT_EQ(response.raw_output_contents_size(), 2);
  EXPECT_EQ(response.raw_output_contents(0).size(), 8u);
  EXPECT_EQ(std::memcmp(response.raw_output_contents(1).data(), y.data(), 24), 0);
}

// --- Shared memory -------------------------------------------------------------------------------

class OipSharedMemoryTest : public ::testing::Test {
 protected:
  OipSharedMemoryTest() {
    EXPECT_TRUE(memory_.RegisterSystem("r", object_.key(), 0, object_.size()).ok());
  }

  absl::StatusOr<DecodedInfer> Decode(const ModelInferRequest& message) {
    return oip::DecodeInfer(WireMessage(message.SerializeAsString()).bytes(), kNow, memory_);
  }

  // K in shared memory at 64, Q and V in the message.
  static ModelInferRequest MixedMessage() {
    ModelInferRequest message = DistinctMessage();
    Share(*message.mutable_inputs(1), "r", 64, 48);
    message.mutable_raw_input_contents()->DeleteSubrange(1, 1);
    return message;
  }

  const test::SharedObject object_{4096};
  SharedMemory memory_{{.allowed = true, .key_prefix = "rapt", .open_cuda = {}}};
};

TEST_F(OipSharedMemoryTest, ASharedInputHasNoRawEntry) {
  std::fill_n(object_.data() + 64, 48, std::byte{'S'});
  const absl::StatusOr<DecodedInfer> decoded = Decode(MixedMessage());
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const auto& inputs = decoded->request.inputs;
  EXPECT_FALSE(inputs[Role::kQ].is_shared);
  EXPECT_TRUE(inputs[Role::kK].is_shared);
  EXPECT_EQ(Gather(inputs[Role::kK]), std::string(48, 'S'));
  object_.data()[64] = std::byte{'T'};
  EXPECT_EQ(Gather(inputs[Role::kK])[0], 'T') << "read in place";
  EXPECT_EQ(inputs[Role::kV].size, 48);
}

TEST_F(OipSharedMemoryTest, RawEntriesAreCountedWithoutSharedInputs) {
  ModelInferRequest message = MixedMessage();
  message.add_raw_input_contents(std::string(48, 'K'));
  const std::string text(Decode(message).status().message());
  EXPECT_THAT(text, HasSubstr("3"));
  EXPECT_THAT(text, HasSubstr("2 inputs"));
}

TEST_F(OipSharedMemoryTest, ContentsAndSharedMemoryDoNotMix) {
  ModelInferRequest message = TypedMessage();
  Share(*message.mutable_inputs(0), "r", 0, 48);
  const absl::Status status = Decode(message).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("Q has contents"));
}

TEST_F(OipSharedMemoryTest, KeyLengthsAreCopied) {
  ModelInferRequest message = RawMessage();
  Share(AddInput(message, "nonpad_kv_seqlen", "INT64", {1}), "r", 3, 8);  // of any alignment
  const int64_t length = 2;
  std::memcpy(object_.data() + 3, &length, sizeof(length));
  const absl::StatusOr<DecodedInfer> decoded = Decode(message);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  object_.data()[3] = std::byte{99};
  EXPECT_THAT(decoded->request.key_lengths, ElementsAre(2));
}

TEST_F(OipSharedMemoryTest, ASharedOutputLeavesAnEmptyEntry) {
  ModelInferRequest message = RawMessage();
  auto& y = *message.add_outputs();
  y.set_name("Y");
  Share(y, "r", 128, 1000);  // more than it needs
  message.add_outputs()->set_name("lse");
  const absl::StatusOr<DecodedInfer> decoded = Decode(message);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const absl::Span<std::byte> place = decoded->request.places[Role::kY].bytes;
  ASSERT_EQ(place.size(), 48u);
  place[0] = std::byte{5};
  EXPECT_EQ(object_.data()[128], std::byte{5});
  EXPECT_EQ(decoded->request.places[Role::kLse].bytes.data(), nullptr);

  const std::vector<float> lse = {7, 8, 9};
  Result result;
  result.outputs[Role::kY].bytes = place;
  result.outputs[Role::kLse].bytes = {reinterpret_cast<const std::byte*>(lse.data()), 12};
  inference::ModelInferResponse response;
  ASSERT_TRUE(response.ParseFromString(Gather(EncodeInfer(*decoded, result))));
  const auto& parameters = response.outputs(0).parameters();
  EXPECT_EQ(parameters.at("shared_memory_region").string_param(), "r");
  EXPECT_EQ(parameters.at("shared_memory_offset").int64_param(), 128);
  EXPECT_EQ(parameters.at("shared_memory_byte_size").int64_param(), 48);
  ASSERT_EQ(response.raw_output_contents_size(), 2);
  EXPECT_EQ(response.raw_output_contents(0), "");
  EXPECT_EQ(response.raw_output_contents(1).size(), 12u);
}

TEST_F(OipSharedMemoryTest, RejectsWhatDoesNotFit) {
  const auto input = [](const std::string& region, int64_t offset, int64_t byte_size) {
    ModelInferRequest message = MixedMessage();
    Share(*message.mutable_inputs(1), region, offset, byte_size);
    return message;
  };
  const auto output = [](int64_t offset, int64_t byte_size) {
    ModelInferRequest message = RawMessage();
    message.add_outputs()->set_name("Y");
    Share(*message.mutable_outputs(0), "r", offset, byte_size);
    return message;
  };
  const struct {
    ModelInferRequest message;
    absl::StatusCode code;
    std::vector<const char*> fragments;
  } cases[] = {
      {input("nowhere", 0, 48), absl::StatusCode::kNotFound, {"input K", "nowhere"}},
      {input("r", 4090, 48), absl::StatusCode::kInvalidArgument, {"input K", "4090", "4096"}},
      {input("r", 0, 40), absl::StatusCode::kInvalidArgument, {"input K", "40", "48"}},
      {output(0, 40), absl::StatusCode::kInvalidArgument, {"output Y", "40", "48"}},
      {output(2, 48), absl::StatusCode::kInvalidArgument, {"output Y", "2", "aligned", "4"}},
      {output(-4, 48), absl::StatusCode::kInvalidArgument, {"output Y", "-4"}},
  };
  for (const auto& c : cases) {
    const absl::Status status = Decode(c.message).status();
    EXPECT_EQ(status.code(), c.code) << status;
    for (const char* fragment : c.fragments) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(fragment));
    }
  }
}

TEST_F(OipSharedMemoryTest, TheRequestOwnsAndChecksItsRegions) {
  test::SharedObject short_lived(4096);
  ASSERT_TRUE(memory_.RegisterSystem("s", short_lived.key(), 0, 4096).ok());
  ModelInferRequest message = MixedMessage();
  Share(*message.mutable_inputs(1), "s", 0, 48);
  const absl::StatusOr<DecodedInfer> decoded = Decode(message);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  ASSERT_TRUE(memory_.Unregister(SharedMemory::Kind::kSystem, "").ok());
  EXPECT_TRUE(decoded->request.check_shared_memory().ok());
  short_lived.Truncate(0);
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kK]), std::string(48, '\0'));
  EXPECT_THAT(std::string(decoded->request.check_shared_memory().message()),
              HasSubstr("truncated"));
}

// --- Refusals ------------------------------------------------------------------------------------

struct Refusal {
  const char* name;
  std::function<void(ModelInferRequest&)> spoil;  // changes a valid message of raw tensors
  absl::StatusCode code;
  std::vector<const char*> fragments;  // of the expected error message
};

constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;

void Rename(ModelInferRequest& m, int input, const char* name) {
  m.mutable_inputs(input)->set_name(name);
}

void SetShape(ModelInferRequest& m, int input, const std::vector<int64_t>& shape) {
  m.mutable_inputs(input)->mutable_shape()->Assign(shape.begin(), shape.end());
}

const Refusal kRefusals[] = {
    {"NoSuchModel",
     [](auto& m) { m.set_model_name("gpt"); },
     absl::StatusCode::kNotFound,
     {"gpt", "attention"}},
    {"NoModel", [](auto& m) { m.clear_model_name(); }, absl::StatusCode::kNotFound, {"attention"}},
    {"NoSuchVersion",
     [](auto& m) { m.set_model_version("2"); },
     absl::StatusCode::kNotFound,
     {"'2'", "'1'"}},
    {"UnknownInput", [](auto& m) { Rename(m, 0, "W"); }, kInvalid, {"input W", "Q, K, V"}},
    {"InputTwice", [](auto& m) { Rename(m, 1, "Q"); }, kInvalid, {"Q is given twice"}},
    {"UnknownDatatype",
     [](auto& m) { m.mutable_inputs(0)->set_datatype("INT4"); },
     kInvalid,
     {"input Q", "INT4", "FP32"}},
    {"IntegerQueries",
     [](auto& m) {
       m.mutable_inputs(0)->set_datatype("INT8");
       m.mutable_raw_input_contents(0)->resize(m.raw_input_contents(0).size() / 4);
     },
     kInvalid,
     {"Q", "INT8", "FP32"}},
    {"NoDatatype", [](auto& m) { m.mutable_inputs(0)->clear_datatype(); }, kInvalid, {"Q", "FP32"}},
    {"RawTooShort",
     [](auto& m) { m.mutable_raw_input_contents(1)->resize(47); },
     kInvalid,
     {"K", "47", "48"}},
    {"RawTooLong",
     [](auto& m) { m.mutable_raw_input_contents(1)->resize(49); },
     kInvalid,
     {"K", "49", "48"}},
    {"RawMissing",
     [](auto& m) { m.mutable_raw_input_contents()->RemoveLast(); },
     kInvalid,
     {"raw_input_contents", "2", "3"}},
    {"RawTooMany",
     [](auto& m) { m.add_raw_input_contents("x"); },
     kInvalid,
     {"raw_input_contents", "4", "3"}},
    {"RawAndTyped",
     [](auto& m) { m.mutable_inputs(0)->mutable_contents()->add_fp32_contents(1); },
     kInvalid,
     {"Q", "raw_input_contents"}},
    {"NegativeAxis",
     [](auto& m) {
       SetShape(m, 0, {1, 1, -3, 4});
     },
     kInvalid,
     {"Q", "-3", "negative"}},
    {"SizeOverflows",
     [](auto& m) {
       SetShape(m, 0, {1LL << 40, 1LL << 40, 3, 4});
     },
     kInvalid,
     {"Q", "overflow"}},
    {"NoShape", [](auto& m) { SetShape(m, 0, {}); }, kInvalid, {"Q"}},
    {"LengthsOfFloats",
     [](auto& m) { AddRaw(m, "nonpad_kv_seqlen", "FP32", {1}); },
     kInvalid,
     {"nonpad_kv_seqlen", "FP32", "INT64"}},
    {"SharedMemory",
     [](auto& m) {
       Share(*m.mutable_inputs(0), "r", 0, 48);
       m.mutable_raw_input_contents()->RemoveLast();
     },
     absl::StatusCode::kUnimplemented,
     {"Q", "shared memory"}},
    {"SharedMemoryOutput",
     [](auto& m) {
       auto& output = *m.add_outputs();
       output.set_name("Y");
       Share(output, "r", 0, 48);
     },
     absl::StatusCode::kUnimplemented,
     {"Y", "shared memory"}},
    {"SharedMemoryWithoutSize",
     [](auto& m) {
       (*m.mutable_inputs(0)->mutable_parameters())["shared_memory_region"].set_string_param("r");
     },
     kInvalid,
     {"Q", "shared_memory_byte_size"}},
    {"SharedMemoryRegionThatIsNoName",
     [](auto& m) {
       (*m.mutable_inputs(0)->mutable_parameters())["shared_memory_region"].set_int64_param(7);
     },
     kInvalid,
     {"Q", "shared_memory_region", "7"}},
    {"SharedMemorySizeAlone",
     [](auto& m) {
       (*m.mutable_inputs(0)->mutable_parameters())["shared_memory_byte_size"].set_int64_param(48);
     },
     kInvalid,
     {"Q", "shared_memory_region"}},
    {"Classification",
     [](auto& m) {
       auto& output = *m.add_outputs();
       output.set_name("Y");
       (*output.mutable_parameters())["classification"].set_int64_param(1);
     },
     kInvalid,
     {"output Y has parameter classification"}},
    {"UnknownOutput",
     [](auto& m) { m.add_outputs()->set_name("Z"); },
     kInvalid,
     {"output Z", "lse"}},
    {"OutputTwice",
     [](auto& m) {
       m.add_outputs()->set_name("Y");
       m.add_outputs()->set_name("Y");
     },
     kInvalid,
     {"Y", "twice"}},
    {"UnknownParameter",
     [](auto& m) { Parameter(m, "is_casual").set_bool_param(true); },
     kInvalid,
     {"is_casual"}},
    {"PresentValuesInKeys",
     [](auto& m) {
       m.mutable_inputs()->RemoveLast();
       m.mutable_raw_input_contents()->RemoveLast();
       Parameter(m, "v_head_size").set_int64_param(3);
       m.add_outputs()->set_name("present_value");
     },
     kInvalid,
     {"present_value", "v_head_size"}},
    {"ParameterNotSet", [](auto& m) { Parameter(m, "scale"); }, kInvalid, {"scale", "not set"}},
    {"ScaleOfWords",
     [](auto& m) { Parameter(m, "scale").set_string_param("large"); },
     kInvalid,
     {"scale", "large", "number"}},
    {"ScaleOfBool",
     [](auto& m) { Parameter(m, "scale").set_bool_param(true); },
     kInvalid,
     {"scale", "true"}},
    {"HeadsOfDouble",
     [](auto& m) { Parameter(m, "q_num_heads").set_double_param(2); },
     kInvalid,
     {"q_num_heads", "2", "a whole number"}},
    {"HeadsBeyondInt64",
     [](auto& m) { Parameter(m, "q_num_heads").set_uint64_param(~uint64_t{0}); },
     kInvalid,
     {"q_num_heads", "18446744073709551615"}},
    {"TimeoutNegative",
     [](auto& m) { Parameter(m, "timeout").set_int64_param(-1); },
     kInvalid,
     {"timeout", "-1"}},
    {"PriorityNegative",
     [](auto& m) { Parameter(m, "priority").set_int64_param(-1); },
     kInvalid,
     {"priority", "-1"}},
    {"ResponseBeyondAMessage",
     [](auto& m) {
       m.clear_inputs();
       m.clear_raw_input_contents();
       for (const char* name : {"Q", "K", "V"}) AddRaw(m, name, "FP32", {1, 1, 1 << 15, 1});
       m.add_outputs()->set_name("qk_matmul_output");
     },
     absl::StatusCode::kResourceExhausted,
     {"4294967296", "2147418111"}},
};

class OipRefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(OipRefusalTest, NamesWhatIsWrong) {
  ModelInferRequest message = RawMessage();
  GetParam().spoil(message);
  const absl::Status status = DecodeInfer(message, kNow).status();
  EXPECT_EQ(status.code(), GetParam().code) << status;
  for (const char* fragment : GetParam().fragments) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(fragment));
  }
}

INSTANTIATE_TEST_SUITE_P(All, OipRefusalTest, ::testing::ValuesIn(kRefusals),
                         [](const auto& info) { return std::string(info.param.name); });

const Refusal kBackwardRefusals[] = {
    {"UnknownInput",
     [](auto& m) { AddRaw(m, "dX", "FP32", {1}); },
     kInvalid,
     {"unknown input dX", "dY, Y, lse, dlse"}},
    {"OutputOfTheForwardPass",
     [](auto& m) { m.add_outputs()->set_name("Y"); },
     kInvalid,
     {"unknown output Y; the outputs are dQ, dK, dV, d_attn_mask,"}},
    {"ScoreMode",
     [](auto& m) { Parameter(m, "qk_matmul_output_mode").set_int64_param(0); },
     kInvalid,
     {"unknown request parameter qk_matmul_output_mode"}},
};

class OipBackwardRefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(OipBackwardRefusalTest, NamesWhatIsWrong) {
  ModelInferRequest message = BackwardMessage();
  GetParam().spoil(message);
  const absl::Status status = DecodeInfer(message, kNow).status();
  EXPECT_EQ(status.code(), GetParam().code) << status;
  for (const char* fragment : GetParam().fragments) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(fragment));
  }
}

INSTANTIATE_TEST_SUITE_P(All, OipBackwardRefusalTest, ::testing::ValuesIn(kBackwardRefusals),
                         [](const auto& info) { return std::string(info.param.name); });

const Refusal kTypedRefusals[] = {
    {"TooFewValues",
     [](auto& m) {
       m.mutable_inputs(1)->mutable_contents()->mutable_fp32_contents()->RemoveLast();
     },
     kInvalid,
     {"K", "11", "12", "fp32_contents"}},
    {"NoContents",
     [](auto& m) { m.mutable_inputs(1)->clear_contents(); },
     kInvalid,
     {"K", "0", "12"}},
    {"WrongField",
     [](auto& m) {
       m.mutable_inputs(1)->mutable_contents()->clear_fp32_contents();
       for (int i = 0; i < 12; ++i) m.mutable_inputs(1)->mutable_contents()->add_fp64_contents(i);
     },
     kInvalid,
     {"K", "FP32", "fp32_contents"}},
    {"TwoFields",
     [](auto& m) { m.mutable_inputs(1)->mutable_contents()->add_bytes_contents("x"); },
     kInvalid,
     {"K", "fp32_contents alone"}},
    {"TypedFp16",
     [](auto& m) { m.mutable_inputs(0)->set_datatype("FP16"); },
     kInvalid,
     {"Q", "FP16", "raw_input_contents"}},
    {"TypedBf16",
     [](auto& m) { m.mutable_inputs(0)->set_datatype("BF16"); },
     kInvalid,
     {"Q", "BF16", "raw_input_contents"}},
};

class OipTypedRefusalTest : public ::testing::TestWithParam<Refusal> {};

TEST_P(OipTypedRefusalTest, NamesWhatIsWrong) {
  ModelInferRequest message = TypedMessage();
  GetParam().spoil(message);
  const absl::Status status = DecodeInfer(message, kNow).status();
  EXPECT_EQ(status.code(), GetParam().code) << status;
  for (const char* fragment : GetParam().fragments) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(fragment));
  }
}

INSTANTIATE_TEST_SUITE_P(All, OipTypedRefusalTest, ::testing::ValuesIn(kTypedRefusals),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace rapt::oip
