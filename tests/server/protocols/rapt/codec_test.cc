// Decoding by rapt.v1's codec. rapt_service_test tests rejected messages through the server.
#include "server/protocols/rapt/codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "server/protocols/rapt/stream_codec.h"
#include "server/protocols/response_size.h"
#include "tests/support/fake_device_memory.h"
#include "tests/support/shared_object.h"
#include "tests/support/wire_message.h"

namespace rapt::native {
namespace {

using test::Gather;
using test::WireMessage;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

void SetTensor(v1::Tensor& tensor, v1::DataType dtype, const std::vector<int64_t>& shape,
               int64_t element_bytes) {
  tensor.set_dtype(dtype);
  tensor.mutable_shape()->Assign(shape.begin(), shape.end());
  const int64_t count =
      std::accumulate(shape.begin(), shape.end(), int64_t{1}, std::multiplies<>());
  tensor.set_data(std::string(count * element_bytes, '\0'));
}

// Two batch rows, four query heads over two, three queries, five keys, sizes 8 and 6.
// Shared memory that is not allowed.
const SharedMemory kNoSharedMemory({});

v1::AttendRequest SomeCall() {
  v1::AttendRequest message;
  SetTensor(*message.mutable_q(), v1::FP32, {2, 4, 3, 8}, 4);
  SetTensor(*message.mutable_k(), v1::FP32, {2, 2, 5, 8}, 4);
  SetTensor(*message.mutable_v(), v1::FP32, {2, 2, 5, 6}, 4);
  return message;
}

// Only results that do not point into the message stay valid.
absl::StatusOr<DecodedCall> Decode(const v1::AttendRequest& message,
                                   const SharedMemory& shared_memory = kNoSharedMemory) {
  return DecodeAttend(WireMessage(message.SerializeAsString()).bytes(), shared_memory);
}

Request MustDecode(const v1::AttendRequest& message) {
  absl::StatusOr<DecodedCall> call = Decode(message);
  EXPECT_TRUE(call.ok()) << call.status();
  return call.ok() ? std::move(call->request) : Request{};
}

Problem DecodedProblem(const v1::AttendRequest& message) {
  return MustDecode(message).call.problem;
}

using Decoder = absl::StatusOr<DecodedCall> (*)(const MessageBytes&, const SharedMemory&);

// Expects the payloads of `tensors`, which are those of the call in order, where the message is.
void ExpectTensorsInPlace(const google::protobuf::Message& message,
                          absl::Span<v1::Tensor* const> tensors, Decoder decode = DecodeAttend) {
  char letter = 'a';
  for (v1::Tensor* tensor : tensors) {  // distinct bytes
    tensor->set_data(std::string(tensor->data().size(), letter++));
  }
  const WireMessage bytes(message.SerializeAsString());
  const absl::StatusOr<DecodedCall> decoded = decode(bytes.bytes(), kNoSharedMemory);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  size_t n = 0;
  for (Role role : InputTensorsOf(decoded->request.call.problem)) {
    const InputBytes& input = decoded->request.inputs[role];
    EXPECT_TRUE(bytes.Contains(input.data)) << n;
    ASSERT_LT(n, tensors.size());
    EXPECT_EQ(Gather(input), tensors[n++]->data()) << kNativeNames[role];
  }
  EXPECT_EQ(n, tensors.size());
}

TEST(RaptCodecTest, ReadsTensorsInPlace) {
  v1::AttendRequest message = SomeCall();
  SetTensor(*message.mutable_mask(), v1::FP16, {3, 5}, 2);
  SetTensor(*message.mutable_past_key(), v1::FP32, {2, 2, 1, 8}, 4);
  SetTensor(*message.mutable_past_value(), v1::FP32, {2, 2, 1, 6}, 4);
  SetTensor(*message.mutable_attention_bias(), v1::BF16, {3, 1}, 2);
  SetTensor(*message.mutable_head_sink(), v1::FP32, {4}, 4);
  SetTensor(*message.mutable_relative_bias(), v1::FP32, {4, 3}, 4);
  SetTensor(*message.mutable_relative_keys(), v1::FP32, {1, 5, 8}, 4);
  SetTensor(*message.mutable_relative_values(), v1::FP32, {4, 1, 6}, 4);
  SetTensor(*message.mutable_relative_query(), v1::FP32, {2, 4, 3, 8}, 4);
  v1::Tensor* const tensors[] = {message.mutable_q(),
                                 message.mutable_k(),
                                 message.mutable_v(),
                                 message.mutable_mask(),
                                 message.mutable_past_key(),
                                 message.mutable_past_value(),
                                 message.mutable_attention_bias(),
                                 message.mutable_head_sink(),
                                 message.mutable_relative_bias(),
                                 message.mutable_relative_keys(),
                                 message.mutable_relative_values(),
                                 message.mutable_relative_query()};
  ExpectTensorsInPlace(message, tensors);
}

// Unlike in the Open Inference Protocol.
TEST(RaptCodecTest, QueriesAreAtTheFirstKeysByDefault) {
  EXPECT_EQ(DecodedProblem(SomeCall()).alignment, Alignment::kTopLeft);
}

TEST(RaptCodecTest, ReadsThePriority) {
  v1::AttendRequest message = SomeCall();
  message.set_priority(3);
  EXPECT_EQ(MustDecode(message).priority, 3u);
}

TEST(RaptCodecTest, ReadsThePriorityOfAStream) {
  v1::AttendStreamRequest message;
  v1::AttendStreamHeader& header = *message.mutable_header();
  header.set_direction(v1::KEYS_STREAM);
  header.set_dtype(v1::FP32);
  header.set_batch(1);
  header.set_query_heads(1);
  header.set_kv_heads(1);
  header.set_query_length(2);
  header.set_key_length(3);
  header.set_head_size(4);
  header.set_value_head_size(4);
  header.set_priority(3);
  const absl::StatusOr<StreamRequest> request =
      DecodeStreamHeader(WireMessage(message.SerializeAsString()).bytes());
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_EQ(request->priority, 3u);
}

TEST(RaptCodecTest, ThreeDimensionsWithoutHeadCountsAreOneHead) {
  v1::AttendRequest message;
  SetTensor(*message.mutable_q(), v1::BF16, {2, 3, 8}, 2);
  SetTensor(*message.mutable_k(), v1::BF16, {2, 5, 8}, 2);
  SetTensor(*message.mutable_v(), v1::BF16, {2, 5, 6}, 2);
  SetTensor(*message.mutable_mask(), v1::BOOL, {2, 1, 5}, 1);
  const Problem p = DecodedProblem(message);
  EXPECT_EQ(p.dtype, DType::kBFloat16);
  EXPECT_EQ(p.query_heads, 1);
  EXPECT_EQ(p.head_size, 8);
  EXPECT_THAT(p.mask->dims, ElementsAre(2, 1, 1, 5)) << "rank 3 is [B, S, T] here";
}

template <typename Int>
std::string Bytes(const std::vector<Int>& values) {
  std::string bytes(values.size() * sizeof(Int), '\0');
  std::memcpy(bytes.data(), values.data(), bytes.size());
  return bytes;
}

// Decodes a call with that mask [3, 5] and converts the mask into `bools`.
template <typename Int>
absl::Status WriteMask(v1::DataType dtype, const std::vector<Int>& values,
                       std::vector<std::byte>& bools) {
  v1::AttendRequest message = SomeCall();
  SetTensor(*message.mutable_mask(), dtype, {3, 5}, sizeof(Int));
  message.mutable_mask()->set_data(Bytes(values));
  const WireMessage bytes(message.SerializeAsString(), 11);
  absl::StatusOr<DecodedCall> decoded = DecodeAttend(bytes.bytes(), kNoSharedMemory);
  if (!decoded.ok()) return decoded.status();
  Request& request = decoded->request;
  EXPECT_EQ(request.call.problem.mask->dtype, DType::kBool);
  EXPECT_FALSE(request.inputs[Role::kMask].present());
  EXPECT_EQ(request.inputs[Role::kMask].size, 15) << "one byte per element";
  bools.assign(request.inputs[Role::kMask].size, std::byte{9});
  return request.write_mask(absl::MakeSpan(bools));
}

template <typename Int>
void ExpectBecomesBool(v1::DataType dtype) {
  std::vector<std::byte> bools;
  const std::vector<Int> values = {1, 0, 1, 1, 0, 0, 0, 1, 1, 1, 0, 1, 0, 1, 0};
  const absl::Status status = WriteMask(dtype, values, bools);
  ASSERT_TRUE(status.ok()) << status;
  for (size_t n = 0; n < values.size(); ++n) {
    EXPECT_EQ(bools[n], static_cast<std::byte>(values[n])) << v1::DataType_Name(dtype) << " " << n;
  }
}

TEST(RaptCodecTest, IntegerMasksBecomeBool) {
  ExpectBecomesBool<int8_t>(v1::INT8);
  ExpectBecomesBool<uint8_t>(v1::UINT8);
  ExpectBecomesBool<int32_t>(v1::INT32);
  ExpectBecomesBool<int64_t>(v1::INT64);
}

// Values that would be 0 or 1 if truncated to fewer bytes.
TEST(RaptCodecTest, IntegerMasksMustHoldZeroAndOne) {
  std::vector<std::byte> bools;
  std::vector<int64_t> wide(15, 1);
  wide[7] = int64_t{1} << 32;
  absl::Status status = WriteMask(v1::INT64, wide, bools);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("mask[1, 2] is 4294967296; INT64"));
  std::vector<int32_t> narrow(15, 0);
  narrow[14] = 256;
  status = WriteMask(v1::INT32, narrow, bools);
  EXPECT_THAT(std::string(status.message()), HasSubstr("mask[2, 4] is 256; INT32"));
  std::vector<int8_t> negative(15, 0);
  negative[0] = -1;
  status = WriteMask(v1::INT8, negative, bools);
  EXPECT_THAT(std::string(status.message()), HasSubstr("mask[0, 0] is -1; INT8"));
}

TEST(RaptCodecTest, OtherMasksAreReadInPlace) {
  v1::AttendRequest message = SomeCall();
  SetTensor(*message.mutable_mask(), v1::BOOL, {3, 5}, 1);
  EXPECT_FALSE(MustDecode(message).write_mask);
}

TEST(RaptCodecTest, ReadsTheCallToDiagnose) {
  v1::DiagnoseRequest message;
  *message.mutable_call() = SomeCall();
  message.mutable_call()->mutable_k()->set_data(std::string(2 * 2 * 5 * 8 * 4, 'k'));
  const WireMessage bytes(message.SerializeAsString(), 100);
  const absl::StatusOr<DecodedCall> decoded = DecodeDiagnose(bytes.bytes(), kNoSharedMemory);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kK]), message.call().k().data());
  EXPECT_THAT(decoded->fields.k().shape(), ElementsAre(2, 2, 5, 8));
  EXPECT_TRUE(decoded->fields.k().data().empty());
}

TEST(RaptCodecTest, ReadsTheBackwardPassToDiagnose) {
  v1::DiagnoseRequest message;
  v1::AttendBackwardRequest& backward = *message.mutable_backward();
  *backward.mutable_call() = SomeCall();
  SetTensor(*backward.mutable_dy(), v1::FP32, {2, 4, 3, 6}, 4);
  backward.mutable_dy()->set_data(std::string(2 * 4 * 3 * 6 * 4, 'd'));
  const WireMessage bytes(message.SerializeAsString(), 100);
  const absl::StatusOr<DecodedCall> decoded = DecodeDiagnose(bytes.bytes(), kNoSharedMemory);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_TRUE(decoded->request.call.problem.backward.has_value());
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kOutputGradient]), backward.dy().data());
  EXPECT_THAT(decoded->backward.dy().shape(), ElementsAre(2, 4, 3, 6));
}

TEST(RaptCodecTest, DiagnosesEitherACallOrABackwardPass) {
  v1::DiagnoseRequest message;
  *message.mutable_call() = SomeCall();
  *message.mutable_backward()->mutable_call() = SomeCall();
  const WireMessage bytes(message.SerializeAsString());
  const absl::Status status = DecodeDiagnose(bytes.bytes(), kNoSharedMemory).status();
  EXPECT_TRUE(absl::IsInvalidArgument(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("call and backward are both set"));
}

TEST(RaptCodecTest, TheLastDataOfARepeatedTensorWins) {
  v1::AttendRequest again;
  again.mutable_v()->set_data(std::string(2 * 2 * 5 * 6 * 4, 'v'));
  const WireMessage bytes(SomeCall().SerializeAsString() + again.SerializeAsString());
  const absl::StatusOr<DecodedCall> decoded = DecodeAttend(bytes.bytes(), kNoSharedMemory);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kV]), again.v().data());
}

TEST(RaptCodecTest, TheResponseHoldsTheRequestedOutputs) {
  v1::AttendRequest message = SomeCall();
  message.set_want_lse(true);
  message.set_score_output(v1::WEIGHTS);
  const ResolvedCall call = MustDecode(message).call;
  const std::vector<float> y(2 * 4 * 3 * 6, 1.5f);
  const std::vector<float> lse(2 * 4 * 3, 2.5f);
  const std::vector<float> scores(2 * 4 * 3 * 5, 0.2f);
  const auto buffer = [](const std::vector<float>& values) {
    return OutputBuffer{{reinterpret_cast<const std::byte*>(values.data()), values.size() * 4}, {}};
  };
  Result result;
  result.outputs[Role::kY] = buffer(y);
  result.outputs[Role::kLse] = buffer(lse);
  result.outputs[Role::kScores] = buffer(scores);
  result.routing.backend = BuiltInBackends()[0];
  result.plan = "cpu/avx2 q48 k64 s1";
  result.queue_time = std::chrono::microseconds(12);
  result.compute_time = std::chrono::nanoseconds(34567);
  v1::AttendResponse response;
  ASSERT_TRUE(response.ParseFromString(Gather(EncodeResult(call, {}, result))));
  EXPECT_EQ(response.y().dtype(), v1::FP32);
  EXPECT_THAT(response.y().shape(), ElementsAre(2, 4, 3, 6));
  EXPECT_EQ(response.y().data(), Bytes(y));
  EXPECT_THAT(response.lse().shape(), ElementsAre(2, 4, 3));
  EXPECT_EQ(response.lse().data(), Bytes(lse));
  EXPECT_THAT(response.scores().shape(), ElementsAre(2, 4, 3, 5));
  EXPECT_EQ(response.scores().data(), Bytes(scores));
  EXPECT_FALSE(response.has_present_key() || response.has_present_value());
  EXPECT_EQ(response.backend(), "cpu");
  EXPECT_EQ(response.plan(), "cpu/avx2 q48 k64 s1");
  EXPECT_EQ(response.timing().queue_us(), 12);
  EXPECT_EQ(response.timing().compute_us(), 34);
}

TEST(RaptCodecTest, AResponseBeyondTheMessageLimitIsRejected) {
  v1::AttendRequest message;
  for (v1::Tensor* tensor : {message.mutable_q(), message.mutable_k(), message.mutable_v()}) {
    SetTensor(*tensor, v1::FP32, {1, 1, 1 << 15, 1}, 4);
  }
  EXPECT_TRUE(CheckResponseSize(OutputsInResponse(*Decode(message))).ok());
  message.set_score_output(v1::SCORES);  // 4 GiB
  const absl::Status status = CheckResponseSize(OutputsInResponse(*Decode(message)));
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("4295098368"));
}

// --- AttendBackward ------------------------------------------------------------------------------

v1::AttendBackwardRequest SomeBackward() {
  v1::AttendBackwardRequest message;
  *message.mutable_call() = SomeCall();
  SetTensor(*message.mutable_dy(), v1::FP32, {2, 4, 3, 6}, 4);
  return message;
}

absl::StatusOr<DecodedCall> Decode(const v1::AttendBackwardRequest& message,
                                   const SharedMemory& shared_memory = kNoSharedMemory) {
  return DecodeBackward(WireMessage(message.SerializeAsString()).bytes(), shared_memory);
}

ResolvedCall MustResolve(const v1::AttendBackwardRequest& message) {
  absl::StatusOr<DecodedCall> call = Decode(message);
  EXPECT_TRUE(call.ok()) << call.status();
  return call.ok() ? std::move(call->request.call) : ResolvedCall{};
}

TEST(RaptBackwardCodecTest, ReadsTensorsInPlace) {
  v1::AttendBackwardRequest message = SomeBackward();
  v1::AttendRequest& call = *message.mutable_call();
  SetTensor(*call.mutable_mask(), v1::FP16, {3, 5}, 2);
  SetTensor(*call.mutable_head_sink(), v1::FP32, {4}, 4);
  SetTensor(*message.mutable_y(), v1::FP32, {2, 4, 3, 6}, 4);
  SetTensor(*message.mutable_lse(), v1::FP32, {2, 4, 3}, 4);
  SetTensor(*message.mutable_dlse(), v1::FP32, {2, 4, 3}, 4);
  v1::Tensor* const tensors[] = {
      call.mutable_q(),    call.mutable_k(),         call.mutable_v(),
      call.mutable_mask(), call.mutable_head_sink(), message.mutable_dy(),
      message.mutable_y(), message.mutable_lse(),    message.mutable_dlse()};
  ExpectTensorsInPlace(message, tensors, DecodeBackward);
}

TEST(RaptBackwardCodecTest, TheResponseHoldsTheGradients) {
  v1::AttendBackwardRequest message = SomeBackward();
  message.add_gradients("dv");
  const ResolvedCall call = MustResolve(message);
  const std::vector<float> dv(2 * 2 * 5 * 6, 1.5f);
  Result result;
  result.outputs[Role::kDV] = {
      {reinterpret_cast<const std::byte*>(dv.data()), dv.size() * sizeof(float)}, {}};
  result.routing.backend = BuiltInBackends()[0];
  result.plan = "cpu/avx2";
  result.compute_time = std::chrono::nanoseconds(34567);
  v1::AttendBackwardResponse response;
  ASSERT_TRUE(response.ParseFromString(Gather(EncodeResult(call, {}, result))));
  EXPECT_THAT(response.dv().shape(), ElementsAre(2, 2, 5, 6));
  EXPECT_EQ(response.dv().data(), Bytes(dv));
  EXPECT_FALSE(response.has_dq() || response.has_dk() || response.has_d_mask());
  EXPECT_EQ(response.backend(), "cpu");
  EXPECT_EQ(response.plan(), "cpu/avx2");
  EXPECT_EQ(response.timing().compute_us(), 34);
}

struct BackwardRefusal {
  const char* name;
  void (*spoil)(v1::AttendBackwardRequest& message);
  std::vector<const char*> fragments;
};

const BackwardRefusal kBackwardRefusals[] = {
    {"NoCall", [](auto& m) { m.clear_call(); }, {"q is missing"}},
    {"OutputGradientOfIntegers",
     [](auto& m) {
       SetTensor(*m.mutable_dy(), v1::INT32, {2, 4, 3, 6}, 4);
     },
     {"dy has dtype INT32; it must be FP32, FP16, BF16 or FP64"}},
    {"TooFewBytes",
     [](auto& m) { m.mutable_dy()->set_data("dy"); },
     {"dy has 2 bytes of data", "576"}},
    {"UnknownGradient",
     [](auto& m) { m.add_gradients("dx"); },
     {"gradients has 'dx'; the gradients are dq, dk, dv, d_mask,", "d_additive_weight"}},
    {"GradientOfATensorThatIsAbsent",
     [](auto& m) { m.add_gradients("d_head_sink"); },
     {"d_head_sink is wanted, but head_sink is not given"}},
    {"Scores",
     [](auto& m) { m.mutable_call()->set_score_output(v1::WEIGHTS); },
     {"score_output is set; AttendBackward returns gradients alone"}},
    {"Lse", [](auto& m) { m.mutable_call()->set_want_lse(true); }, {"want_lse is set"}},
    {"Present", [](auto& m) { m.mutable_call()->set_want_present(true); }, {"want_present is set"}},
    {"Places", [](auto& m) { m.mutable_call()->mutable_places()->mutable_y(); }, {"places is set"}},
};

class RaptBackwardRefusalTest : public ::testing::TestWithParam<BackwardRefusal> {};

TEST_P(RaptBackwardRefusalTest, NamesWhatIsWrong) {
  v1::AttendBackwardRequest message = SomeBackward();
  GetParam().spoil(message);
  const absl::Status status = Decode(message).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
  for (const char* fragment : GetParam().fragments) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(fragment));
  }
}

INSTANTIATE_TEST_SUITE_P(All, RaptBackwardRefusalTest, ::testing::ValuesIn(kBackwardRefusals),
                         [](const auto& info) { return std::string(info.param.name); });

// --- Shared memory -------------------------------------------------------------------------------

void Share(v1::SharedMemory& part, const std::string& region, int64_t offset, int64_t byte_size) {
  part.set_region(region);
  part.set_offset(offset);
  part.set_byte_size(byte_size);
}

class RaptSharedMemoryTest : public ::testing::Test {
 protected:
  RaptSharedMemoryTest() {
    EXPECT_TRUE(memory_.RegisterSystem("r", object_.key(), 0, object_.size()).ok());
    message_.mutable_k()->clear_data();
    Share(*message_.mutable_k()->mutable_shared_memory(), "r", 64, kKeyBytes);
  }

  static constexpr int64_t kKeyBytes = 2 * 2 * 5 * 8 * 4;
  static constexpr int64_t kYBytes = 2 * 4 * 3 * 6 * 4;
  const test::SharedObject object_{4096};
  SharedMemory memory_{{.allowed = true, .key_prefix = "rapt", .open_cuda = {}}};
  v1::AttendRequest message_ = SomeCall();  // K is in shared memory
};

TEST_F(RaptSharedMemoryTest, ReadsASharedTensor) {
  const absl::StatusOr<DecodedCall> decoded = Decode(message_, memory_);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  object_.data()[64] = std::byte{'T'};
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kK])[0], 'T');
  EXPECT_TRUE(decoded->request.inputs[Role::kK].is_shared);
  EXPECT_FALSE(decoded->request.inputs[Role::kV].is_shared);
}

TEST_F(RaptSharedMemoryTest, ReadsASharedOutputGradient) {
  v1::AttendBackwardRequest message = SomeBackward();
  *message.mutable_call() = message_;
  message.mutable_dy()->clear_data();
  Share(*message.mutable_dy()->mutable_shared_memory(), "r", 1024, kYBytes);
  const absl::StatusOr<DecodedCall> decoded = Decode(message, memory_);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  object_.data()[1024] = std::byte{'G'};
  EXPECT_EQ(Gather(decoded->request.inputs[Role::kOutputGradient])[0], 'G');
  EXPECT_TRUE(decoded->request.inputs[Role::kOutputGradient].is_shared);
}

TEST_F(RaptSharedMemoryTest, ConvertsASharedIntegerMask) {
  const int32_t mask[] = {1, 0, 1, 1, 0};
  std::memcpy(object_.data(), mask, sizeof(mask));
  v1::Tensor& tensor = *message_.mutable_mask();
  tensor.set_dtype(v1::INT32);
  tensor.add_shape(5);
  Share(*tensor.mutable_shared_memory(), "r", 0, sizeof(mask));
  absl::StatusOr<DecodedCall> decoded = Decode(message_, memory_);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  std::vector<std::byte> bools(5);
  ASSERT_TRUE(decoded->request.write_mask(absl::MakeSpan(bools)).ok());
  EXPECT_THAT(bools,
              ElementsAre(std::byte{1}, std::byte{0}, std::byte{1}, std::byte{1}, std::byte{0}));
}

TEST(RaptCudaSharedMemoryTest, ReadsAndWritesDeviceMemory) {
  const auto device = std::make_shared<test::FakeDeviceMemory>(4096);
  SharedMemory memory(
      {.allowed = true, .key_prefix = "", .open_cuda = [&](auto, auto, auto) { return device; }});
  ASSERT_TRUE(memory.RegisterCuda("d", "handle", 0, 4096).ok());
  v1::AttendRequest message = SomeCall();
  const int64_t key_bytes = static_cast<int64_t>(message.k().data().size());
  message.mutable_k()->clear_data();
  Share(*message.mutable_k()->mutable_shared_memory(), "d", 65, key_bytes);
  v1::Tensor& mask = *message.mutable_mask();
  mask.set_dtype(v1::INT64);
  mask.add_shape(5);
  Share(*mask.mutable_shared_memory(), "d", 2048, 5 * 8);
  Share(*message.mutable_places()->mutable_y(), "d", 3001, 1000);
  absl::StatusOr<DecodedCall> decoded = Decode(message, memory);
  ASSERT_TRUE(decoded.ok()) << decoded.status();

  const InputBytes& key = decoded->request.inputs[Role::kK];
  EXPECT_EQ(key.device.memory, device.get());
  EXPECT_EQ(key.device.offset, 65);
  EXPECT_EQ(key.size, key_bytes);
  EXPECT_EQ(decoded->request.places[Role::kY].device.memory, device.get());
  EXPECT_EQ(decoded->request.places[Role::kY].device.offset, 3001)
      << "device offsets need no alignment";
  device->bytes[2048 + 8] = std::byte{1};
  std::vector<std::byte> bools(5);
  ASSERT_TRUE(decoded->request.write_mask(absl::MakeSpan(bools)).ok());
  EXPECT_THAT(bools,
              ElementsAre(std::byte{0}, std::byte{1}, std::byte{0}, std::byte{0}, std::byte{0}));
  device->fails_to_read = true;
  EXPECT_EQ(decoded->request.write_mask(absl::MakeSpan(bools)).code(),
            absl::StatusCode::kUnavailable);
}

TEST_F(RaptSharedMemoryTest, ASharedOutputIsReferencedInTheResponse) {
  Share(*message_.mutable_places()->mutable_y(), "r", 1024, kYBytes + 100);
  const absl::StatusOr<DecodedCall> decoded = Decode(message_, memory_);
  ASSERT_TRUE(decoded.ok()) << decoded.status();
  const absl::Span<std::byte> place = decoded->request.places[Role::kY].bytes;
  EXPECT_EQ(static_cast<int64_t>(place.size()), kYBytes);
  Result result;
  result.outputs[Role::kY].bytes = place;
  result.routing.backend = BuiltInBackends()[0];
  v1::AttendResponse response;
  ASSERT_TRUE(response.ParseFromString(
      Gather(EncodeResult(decoded->request.call, decoded->fields.places(), result))));
  EXPECT_THAT(response.y().shape(), ElementsAre(2, 4, 3, 6));
  EXPECT_EQ(response.y().data(), "");
  EXPECT_EQ(response.y().shared_memory().region(), "r");
  EXPECT_EQ(response.y().shared_memory().byte_size(), kYBytes);
}

TEST_F(RaptSharedMemoryTest, RejectsWhatDoesNotFit) {
  const auto key_at = [&](const std::string& region, int64_t offset, int64_t byte_size) {
    v1::AttendRequest message = message_;
    Share(*message.mutable_k()->mutable_shared_memory(), region, offset, byte_size);
    return message;
  };
  v1::AttendRequest both = message_;
  both.mutable_k()->set_data(std::string(kKeyBytes, '\0'));
  v1::AttendRequest small = message_;
  Share(*small.mutable_places()->mutable_y(), "r", 0, kYBytes - 1);
  const struct {
    v1::AttendRequest message;
    absl::StatusCode code;
    std::vector<const char*> fragments;
  } cases[] = {
      {key_at("nowhere", 0, kKeyBytes), absl::StatusCode::kNotFound, {"k", "nowhere"}},
      {key_at("r", 4000, kKeyBytes), absl::StatusCode::kInvalidArgument, {"k", "4000", "4096"}},
      {key_at("r", 0, 7), absl::StatusCode::kInvalidArgument, {"k", "7", "640"}},
      {both, absl::StatusCode::kInvalidArgument, {"k has data"}},
      {small, absl::StatusCode::kInvalidArgument, {"y", "575", "576"}},
  };
  for (const auto& c : cases) {
    const absl::Status status = Decode(c.message, memory_).status();
    EXPECT_EQ(status.code(), c.code) << status;
    for (const char* fragment : c.fragments) {
      EXPECT_THAT(std::string(status.message()), HasSubstr(fragment));
    }
  }
}

}  // namespace
}  // namespace rapt::native
