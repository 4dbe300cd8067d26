#include "client/cpp/codec.h"

#include <gmock/gmock.h>
#include <google/protobuf/stubs/logging.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "rapt/choices.h"
#include "rapt/data_type.h"
#include "tests/support/text_message.h"

namespace rapt::client {
namespace {

using google::protobuf::util::MessageDifferencer;
using test::Bytes;
using test::Parse;
using testing::ElementsAre;
using testing::FieldsAre;
using testing::HasSubstr;

constexpr int64_t kNoLimit = int64_t{1} << 30;

// A call of one query and one key, head size 1, with printable bytes.
AttendCall SmallCall() {
  return {.q = {DType::kFloat16, {1, 1, 1, 1}, Bytes("qq")},
          .k = {DType::kFloat16, {1, 1, 1, 1}, Bytes("kk")},
          .v = {DType::kFloat16, {1, 1, 1, 1}, Bytes("vv")}};
}

std::string Flatten(const RequestMessage& message) {
  std::string bytes;
  for (const RequestMessage::Piece& piece : message.pieces()) {
    bytes += piece.bytes;
    bytes.append(reinterpret_cast<const char*>(piece.payload.data()), piece.payload.size());
  }
  EXPECT_EQ(message.size(), static_cast<int64_t>(bytes.size()));
  return bytes;
}

// Returns the message as parsed by generated code, which must serialize it to the same size.
template <typename Message>
Message Parsed(const absl::StatusOr<RequestMessage>& encoded) {
  Message message;
  EXPECT_TRUE(encoded.ok()) << encoded.status();
  if (!encoded.ok()) return message;
  const std::string bytes = Flatten(*encoded);
  EXPECT_TRUE(message.ParseFromString(bytes));
  EXPECT_EQ(message.ByteSizeLong(), bytes.size()) << message.ShortDebugString();
  return message;
}

// Returns the names of a protocol's enumeration, from the number `first` on.
std::vector<std::string> NamesIn(const google::protobuf::EnumDescriptor& type, int first) {
  std::vector<std::string> names;
  for (int n = first; n < type.value_count(); ++n) {
    EXPECT_EQ(type.value(n)->number(), n) << type.full_name();
    names.push_back(type.value(n)->name());
  }
  return names;
}

template <typename Enum>
void ExpectNames(const google::protobuf::EnumDescriptor& type, int first = 0) {
  std::vector<testing::Matcher<std::string>> ours;
  for (const absl::string_view name : kNamesOf<Enum>) {
    ours.push_back(testing::EndsWith(absl::AsciiStrToUpper(name)));
  }
  EXPECT_THAT(NamesIn(type, first), testing::ElementsAreArray(ours)) << type.full_name();
}

TEST(CodecTest, EnumerationsHaveTheProtocolsOrder) {
  std::vector<std::string> dtypes;
  for (const DTypeInfo& info : kDTypes) {
    EXPECT_EQ(static_cast<size_t>(info.dtype), dtypes.size());
    dtypes.emplace_back(info.name);
  }
  EXPECT_EQ(NamesIn(*v1::DataType_descriptor(), v1::FP32), dtypes);
  ExpectNames<Layout>(*v1::Layout_descriptor());
  ExpectNames<Alignment>(*v1::Alignment_descriptor());
  ExpectNames<ScoreFunction>(*v1::ScoreFunction_descriptor());
  ExpectNames<Normalizer>(*v1::Normalizer_descriptor());
  ExpectNames<ScoreOutput>(*v1::ScoreOutput_descriptor(), v1::SCORES);
  ExpectNames<UpdateRule>(*v1::UpdateRule_descriptor());
  ExpectNames<FeatureMap>(*v1::FeatureMap_descriptor());
}

v1::AttendRequest Encoded(const AttendCall& call) {
  return Parsed<v1::AttendRequest>(EncodeAttend(call, kNoLimit));
}

// Decodes the message in slices of `slice_bytes` bytes.
absl::StatusOr<AttendResult> DecodeSliced(const WantedOutputs& wanted, const std::string& bytes,
                                          size_t slice_bytes) {
  std::vector<std::string> pieces;
  for (size_t begin = 0; begin < bytes.size(); begin += slice_bytes) {
    pieces.push_back(bytes.substr(begin, slice_bytes));
    if (begin % 3 == 0) pieces.emplace_back();
  }
  std::vector<absl::Span<const char>> slices(pieces.begin(), pieces.end());
  return DecodeAttend(wanted, {ToByteSlices(slices)}, static_cast<int64_t>(bytes.size()));
}

absl::StatusOr<AttendResult> DecodeWhole(const WantedOutputs& wanted, const std::string& bytes) {
  return DecodeSliced(wanted, bytes, std::max<size_t>(bytes.size(), 1));
}

absl::StatusOr<AttendResult> DecodeText(const WantedOutputs& wanted, const std::string& text) {
  return DecodeWhole(wanted, Parse<v1::AttendResponse>(text).SerializeAsString());
}

TEST(CodecTest, AMinimalCallSetsOnlyItsFields) {
  AttendCall call = SmallCall();
  call.priority = 3;
  const v1::AttendRequest request = Encoded(call);
  const auto expected = Parse<v1::AttendRequest>(R"(
      q { dtype: FP16 shape: [1, 1, 1, 1] data: "qq" }
      k { dtype: FP16 shape: [1, 1, 1, 1] data: "kk" }
      v { dtype: FP16 shape: [1, 1, 1, 1] data: "vv" }
      attention {} priority: 3)");
  EXPECT_TRUE(MessageDifferencer::Equals(request, expected)) << request.DebugString();
}

TEST(CodecTest, ChecksABackwardCall) {
  const BackwardCall valid = {.call = SmallCall(),
                              .dy = {DType::kFloat16, {1, 1, 1, 1}, Bytes("dy")}};
  const int64_t bytes = EncodeBackward(valid, kNoLimit)->size();
  EXPECT_TRUE(EncodeBackward(valid, bytes).ok());
  EXPECT_EQ(EncodeBackward(valid, bytes - 1).status().code(), absl::StatusCode::kResourceExhausted);
  BackwardCall call = valid;
  call.gradients = {"dq", "dz"};
  EXPECT_THAT(EncodeBackward(call, kNoLimit).status().message(),
              HasSubstr("gradients has 'dz'; it takes any of dq, dk, dv, d_mask,"));
  call = valid;
  call.dy.shape = {1, 1, 1, 2};
  EXPECT_THAT(EncodeBackward(call, kNoLimit).status().message(),
              HasSubstr("dy has shape [1, 1, 1, 2] of FP16, which is 4 bytes"));
  call = valid;
  call.call.q.shape = {2};
  EXPECT_THAT(EncodeBackward(call, kNoLimit).status().message(), HasSubstr("q has shape [2]"));
}

TEST(CodecTest, DataMustMatchItsShape) {
  AttendCall call = SmallCall();
  call.k.shape = {1, 1, 2, 1};
  EXPECT_EQ(EncodeAttend(call, kNoLimit).status(),
            absl::InvalidArgumentError("k has shape [1, 1, 2, 1] of FP16, which is 4 bytes, but "
                                       "its data has 2"));
  call = SmallCall();
  call.q = {};
  EXPECT_THAT(EncodeAttend(call, kNoLimit).status().message(), HasSubstr("q has shape []"));
}

TEST(CodecTest, RejectsShapesThatOverflow) {
  for (const Shape& shape :
       {Shape{1, 1, -1, 1}, Shape{0, -1, 1, 1}, Shape{int64_t{1} << 40, int64_t{1} << 40, 1, 1},
        Shape{INT64_MAX, 2, 2, 2}}) {
    AttendCall call = SmallCall();
    call.mask = TensorView{DType::kFloat64, shape, {}};
    const absl::Status status = EncodeAttend(call, kNoLimit).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << ToString(shape);
    EXPECT_THAT(status.message(), HasSubstr("mask has shape " + ToString(shape)));
  }
}

TEST(CodecTest, RejectsAMessageOverTheLimit) {
  for (const auto encode : {EncodeAttend, EncodeDiagnose}) {
    const int64_t bytes = encode(SmallCall(), kNoLimit)->size();
    EXPECT_TRUE(encode(SmallCall(), bytes).ok());
    for (const int64_t limit : {bytes - 1, int64_t{5}, int64_t{1}}) {
      const absl::Status status = encode(SmallCall(), limit).status();
      EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << limit;
      EXPECT_THAT(status.message(), HasSubstr("max_message_bytes is"));
    }
  }
}

TEST(CodecTest, LargeTensorsAreNotCopied) {
  const std::string q(100'000, 'q'), k(50'000, 'k'), v(10, 'v');
  const AttendCall call{.q = {DType::kUint8, {100'000}, Bytes(q)},
                        .k = {DType::kUint8, {50'000}, Bytes(k)},
                        .v = {DType::kUint8, {10}, Bytes(v)}};
  const absl::StatusOr<RequestMessage> message = EncodeAttend(call, kNoLimit);
  ASSERT_TRUE(message.ok()) << message.status();
  std::vector<const std::byte*> payloads;
  for (const RequestMessage::Piece& piece : message->pieces()) {
    if (!piece.payload.empty()) payloads.push_back(piece.payload.data());
  }
  EXPECT_THAT(payloads, ElementsAre(Bytes(q).data(), Bytes(k).data()));
}

TEST(CodecTest, EncodesLikeGeneratedCode) {
  std::mt19937 random(1);
  const auto draw = [&random](int64_t most) {
    return std::uniform_int_distribution<int64_t>(0, most)(random);
  };
  // Sizes around those at which a length takes another byte and payloads are no longer copied.
  const int64_t sizes[] = {0, 1, 100, 127, 128, 129, 4095, 4096, 4097, 16'383, 16'384, 40'000};
  const std::string bytes(40'000, 'x');
  const auto draw_tensor = [&] {
    const int64_t size = sizes[draw(std::size(sizes) - 1)];
    return TensorView{DType::kInt8, {1, size}, Bytes(bytes).first(size)};
  };
  for (int n = 0; n < 300; ++n) {
    SCOPED_TRACE(n);
    std::vector<int64_t> lengths(draw(3));
    for (int64_t& length : lengths) length = draw(1000);
    AttendCall call{.q = draw_tensor(), .k = draw_tensor(), .v = draw_tensor()};
    if (draw(1)) call.mask = draw_tensor();
    if (draw(1)) call.past_key = draw_tensor();
    if (draw(1)) call.past_value = draw_tensor();
    if (draw(1)) call.attention_bias = draw_tensor();
    if (draw(1)) call.head_sink = draw_tensor();
    if (draw(1)) call.alibi_slopes = draw_tensor();
    if (draw(1)) call.bias_table = draw_tensor();
    if (draw(1)) call.relative_bias = draw_tensor();
    if (draw(1)) call.relative_keys = draw_tensor();
    if (draw(1)) call.relative_values = draw_tensor();
    if (draw(1)) call.relative_query = draw_tensor();
    if (draw(1)) call.additive_weight = draw_tensor();
    if (draw(1)) call.head_alpha = draw_tensor();
    call.key_lengths = lengths;
    call.query_heads = draw(300);
    call.causal = draw(1) != 0;
    call.wants_lse = draw(1) != 0;
    const v1::AttendRequest request = Encoded(call);
    EXPECT_EQ(request.q().data().size(), call.q.data.size());
    EXPECT_EQ(request.has_past_value(), call.past_value.has_value());
    const auto diagnose = Parsed<v1::DiagnoseRequest>(EncodeDiagnose(call, kNoLimit));
    EXPECT_TRUE(MessageDifferencer::Equals(diagnose.call(), request));
  }
}

TEST(CodecTest, ReadsAWholeResult) {
  const auto response = Parse<v1::AttendResponse>(R"(
      y { dtype: FP16 shape: [1, 1] data: "yy" }
      scores { dtype: FP16 shape: [1] data: "ss" }
      lse { dtype: FP32 shape: [1] data: "\000\000\200\077" }
      present_key { dtype: FP16 shape: [1] data: "pk" }
      present_value { dtype: FP16 shape: [1] data: "pv" }
      backend: "cpu" plan: "cpu/avx2 q1" timing { queue_us: 3 compute_us: 4 })");
  const std::string bytes = response.SerializeAsString();
  const WantedOutputs wanted =
      WantedBy({.score_output = ScoreOutput::kScores, .wants_lse = true, .wants_present = true});
  for (size_t slice_bytes = 1; slice_bytes <= bytes.size(); ++slice_bytes) {
    SCOPED_TRACE(slice_bytes);
    const absl::StatusOr<AttendResult> result = DecodeSliced(wanted, bytes, slice_bytes);
    ASSERT_TRUE(result.ok()) << result.status();
    EXPECT_EQ(result->y.dtype(), DType::kFloat16);
    EXPECT_EQ(result->y.shape(), (Shape{1, 1}));
    EXPECT_EQ(result->y.bytes(), Bytes("yy"));
    EXPECT_EQ(result->scores->bytes(), Bytes("ss"));
    EXPECT_THAT(result->lse->values<float>(), ElementsAre(1.0f));
    EXPECT_EQ(result->present_key->bytes(), Bytes("pk"));
    EXPECT_EQ(result->present_value->bytes(), Bytes("pv"));
    EXPECT_EQ(result->backend, "cpu");
    EXPECT_EQ(result->plan, "cpu/avx2 q1");
    EXPECT_EQ(result->queue_time, std::chrono::microseconds(3));
    EXPECT_EQ(result->compute_time, std::chrono::microseconds(4));
  }
}

absl::StatusOr<BackwardResult> DecodeBackwardText(const BackwardCall& call,
                                                  const std::string& text) {
  const std::string bytes = Parse<v1::AttendBackwardResponse>(text).SerializeAsString();
  return DecodeBackward(GradientsWantedBy(call),
                        {ToByteSlices(std::vector<absl::Span<const char>>{bytes})},
                        static_cast<int64_t>(bytes.size()));
}

TEST(CodecTest, ReadsTheGradientsThatACallRequests) {
  const std::string text = R"(
      dq { dtype: FP16 shape: [1, 1] data: "qq" }
      dk { dtype: FP16 shape: [2] data: "kkkk" }
      dv { dtype: FP16 shape: [1] data: "vv" }
      d_head_sink { dtype: FP32 shape: [1] data: "sink" }
      backend: "cpu" plan: "cpu/avx2" timing { queue_us: 3 compute_us: 4 })";
  BackwardCall call;
  auto result = DecodeBackwardText(call, text);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->dq->bytes(), Bytes("qq"));
  EXPECT_EQ(result->dq->shape(), (Shape{1, 1}));
  EXPECT_EQ(result->dk->bytes(), Bytes("kkkk"));
  EXPECT_EQ(result->dv->bytes(), Bytes("vv"));
  EXPECT_FALSE(result->d_head_sink.has_value());
  EXPECT_EQ(result->backend, "cpu");
  EXPECT_EQ(result->plan, "cpu/avx2");
  EXPECT_EQ(result->queue_time, std::chrono::microseconds(3));
  EXPECT_EQ(result->compute_time, std::chrono::microseconds(4));

  call.call.v_head_size = 1;  // V is in K
  EXPECT_FALSE(DecodeBackwardText(call, text)->dv.has_value());
  call.gradients = {"d_head_sink"};
  result = DecodeBackwardText(call, text);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->d_head_sink->dtype(), DType::kFloat32);
  EXPECT_FALSE(result->dq.has_value());
  call.gradients = {"d_mask"};
  EXPECT_EQ(DecodeBackwardText(call, text).status(),
            absl::InternalError("malformed response from server: no d_mask"));
}

TEST(CodecTest, ARepeatedTensorIsMergedAsByGeneratedCode) {
  const std::string twice =
      Parse<v1::AttendResponse>("y { dtype: FP16 shape: 2 data: 'abcd' }").SerializeAsString() +
      Parse<v1::AttendResponse>("y { dtype: INT8 shape: 3 data: 'uvwxyz' }").SerializeAsString();
  const absl::StatusOr<AttendResult> result = DecodeWhole(WantedBy({}), twice);
  ASSERT_TRUE(result.ok()) << result.status();
  v1::AttendResponse merged;
  ASSERT_TRUE(merged.ParseFromString(twice));
  EXPECT_EQ(result->y.bytes(), Bytes(merged.y().data()));
  EXPECT_THAT(result->y.shape(), testing::ElementsAreArray(merged.y().shape()));
}

// A response that is truncated or has a changed byte is either read as by generated code or
// rejected. Nothing beyond the received bytes is read.
TEST(CodecTest, CorruptResponsesAreInternalOrRead) {
  const google::protobuf::LogSilencer silencer;  // for strings that are not UTF-8
  const std::string bytes = Parse<v1::AttendResponse>(R"(
      y { dtype: FP16 shape: [2, 1] data: "yyyy" } lse { dtype: FP32 shape: 1 data: "abcd" }
      backend: "cpu" timing { queue_us: 300 })")
                                .SerializeAsString();
  const auto check = [](const std::string& broken) {
    const absl::StatusOr<AttendResult> result = DecodeWhole(WantedBy({.wants_lse = true}), broken);
    v1::AttendResponse generated;
    if (!generated.ParseFromString(broken)) {
      EXPECT_FALSE(result.ok());
    }
    if (!result.ok()) {
      EXPECT_EQ(result.status().code(), absl::StatusCode::kInternal) << result.status();
    } else {
      EXPECT_EQ(result->y.bytes(), Bytes(generated.y().data()));
      EXPECT_EQ(result->lse->bytes(), Bytes(generated.lse().data()));
      EXPECT_EQ(result->backend, generated.backend());
    }
  };
  for (size_t length = 0; length < bytes.size(); ++length) check(bytes.substr(0, length));
  for (size_t place = 0; place < bytes.size(); ++place) {
    SCOPED_TRACE(place);
    for (int value = 0; value < 256; ++value) {
      std::string broken = bytes;
      broken[place] = static_cast<char>(value);
      check(broken);
    }
  }
}

// Generated code would allocate a gigabyte of objects for it.
TEST(CodecTest, AResponseOfManySmallFieldsIsRejected) {
  std::string bytes;
  for (int n = 0; n < 1'000'000; ++n) bytes.append("\x0A\x00", 2);
  const absl::Status status = DecodeWhole(WantedBy({}), bytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << status;
  EXPECT_THAT(status.message(), HasSubstr("malformed response from server"));
}

TEST(CodecTest, AnInconsistentResponseIsInternal) {
  const std::pair<const char*, const char*> cases[] = {
      {"", "malformed response from server: no y"},
      {"y { dtype: FP32 shape: 2 data: 'abcd' }", "y of shape [2] of FP32 in 4 bytes"},
      {"y { dtype: FP32 shape: -1 data: '' }", "y of shape [-1] of FP32 in 0 bytes"},
      {"y { shape: 1 data: 'abcd' }", "y has the unknown data type 0"},
      {"y { dtype: FP32 shape: 1 data: 'abcd' }", "malformed response from server: no lse"},
      {"y { dtype: FP32 shape: 1 data: 'abcd' } lse { dtype: FP32 shape: 1 data: '' }",
       "lse of shape [1] of FP32 in 0 bytes"}};
  for (const auto& [text, message] : cases) {
    const absl::Status status = DecodeText(WantedBy({.wants_lse = true}), text).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << text;
    EXPECT_THAT(status.message(), HasSubstr(message)) << text;
  }
}

TEST(CodecTest, UnrequestedOutputsAreIgnored) {
  const absl::StatusOr<AttendResult> result =
      DecodeText(WantedBy({}), "y { dtype: FP32 shape: 0 } scores { dtype: FP32 shape: 0 }");
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->scores.has_value());
}

TEST(CodecTest, ReadsADiagnosis) {
  const absl::StatusOr<Diagnosis> diagnosis = Decode(Parse<v1::DiagnoseResponse>(R"(
      problem: "B=1"
      inputs { name: "q" dtype: BF16 shape: [1, 2] elements: 2 nan_count: 1 positive_inf_count: 2
               negative_inf_count: 3 min: -1 max: 4 mean: 0.5 }
      inputs { name: "k" dtype: BF16 }
      raw_scores { max: 1 } scaled_scores { max: 2 } biased_scores { max: 3 negative_inf_count: 7 }
      pairs: 10 masked_by_mask: 11 masked_by_position: 12
      weights { min: 0 max: 4 } row_sums { max: 5 }
      empty_rows { count: 20 first { batch: 1 head: 2 query: 3 } } output { max: 6 }
      backends { backend: "cpu" chosen: true plan: "p" workspace_bytes: 64 }
      backends { backend: "reference" reason: "slower" }
      warnings: "first" warnings: "second"
      estimates: "third" favor_squared_norm: 0.5 lsh_reachable_weight: 0.25)"));
  ASSERT_TRUE(diagnosis.ok()) << diagnosis.status();
  EXPECT_EQ(diagnosis->problem, "B=1");
  ASSERT_EQ(diagnosis->inputs.size(), 2u);
  const TensorReport& q = diagnosis->inputs[0];
  EXPECT_EQ(q.name, "q");
  EXPECT_EQ(q.dtype, DType::kBFloat16);
  EXPECT_EQ(q.shape, (Shape{1, 2}));
  EXPECT_EQ(q.elements, 2);
  EXPECT_EQ(q.range.nan_count, 1);
  EXPECT_EQ(q.range.positive_inf_count, 2);
  EXPECT_EQ(q.range.negative_inf_count, 3);
  EXPECT_EQ(q.range.min, -1);
  EXPECT_EQ(q.range.max, 4);
  EXPECT_EQ(q.mean, 0.5);
  EXPECT_EQ(diagnosis->inputs[1].range.min, std::nullopt);
  EXPECT_EQ(diagnosis->inputs[1].mean, std::nullopt);
  EXPECT_EQ(diagnosis->raw_scores.max, 1);
  EXPECT_EQ(diagnosis->scaled_scores.max, 2);
  EXPECT_EQ(diagnosis->biased_scores.max, 3);
  EXPECT_EQ(diagnosis->biased_scores.negative_inf_count, 7);
  EXPECT_EQ(diagnosis->pairs, 10);
  EXPECT_EQ(diagnosis->masked_by_mask, 11);
  EXPECT_EQ(diagnosis->masked_by_position, 12);
  EXPECT_EQ(diagnosis->weights.min, 0);
  EXPECT_EQ(diagnosis->weights.max, 4);
  EXPECT_EQ(diagnosis->row_sums.max, 5);
  EXPECT_EQ(diagnosis->empty_rows, 20);
  ASSERT_EQ(diagnosis->first_empty_rows.size(), 1u);
  EXPECT_EQ(diagnosis->first_empty_rows[0].query, 3);
  EXPECT_EQ(diagnosis->output.max, 6);
  ASSERT_EQ(diagnosis->backends.size(), 2u);
  EXPECT_TRUE(diagnosis->backends[0].chosen);
  EXPECT_EQ(diagnosis->backends[0].workspace_bytes, 64);
  EXPECT_EQ(diagnosis->backends[1].reason, "slower");
  EXPECT_THAT(diagnosis->warnings, ElementsAre("first", "second"));
  EXPECT_THAT(diagnosis->estimates, ElementsAre("third"));
  EXPECT_EQ(diagnosis->favor_squared_norm, 0.5);
  EXPECT_EQ(diagnosis->lsh_reachable_weight, 0.25);
}

TEST(CodecTest, ConvertsMemoryEstimatesAndServerInfo) {
  const v1::EstimateMemoryRequest request = Encode(MemoryQuestion{.batch = 32,
                                                                  .query_heads = 8,
                                                                  .kv_heads = 2,
                                                                  .lengths = {512, 1024},
                                                                  .head_size = 64,
                                                                  .value_head_size = 32,
                                                                  .dtype = DType::kBFloat16,
                                                                  .inputs = {.block_q = 1,
                                                                             .block_k = 2,
                                                                             .selected_indices = 3,
                                                                             .alibi = true,
                                                                             .bias_table = 4,
                                                                             .relative_bias = 5,
                                                                             .per_head = true},
                                                                  .linear_time = {6, 7, 8}});
  EXPECT_TRUE(MessageDifferencer::Equals(request, Parse<v1::EstimateMemoryRequest>(R"(
      batch: 32 query_heads: 8 kv_heads: 2 lengths: [512, 1024] head_size: 64 value_head_size: 32
      dtype: BF16 block_q: 1 block_k: 2 selected_indices: 3 alibi: true bias_table: 4
      relative_bias: 5 per_head: true lsh_hashes: 6 lsh_chunk_length: 7 favor_features: 8)")));

  const MemoryEstimates estimates = Decode(Parse<v1::EstimateMemoryResponse>(R"(
      estimates { length: 1 tensor_bytes: 2 standard_bytes: 3 chunked_bytes: 4 fused_bytes: 5
                  plan: "p" inputs { name: "alibi" bytes: 6 saved_bytes: -7 }
                  lsh { refusal: "too long" }
                  linear { workspace_bytes: 8 state_bytes: 9 plan: "l" } }
      chunk: 512)"));
  ASSERT_EQ(estimates.estimates.size(), 1u);
  EXPECT_EQ(estimates.estimates[0].fused_bytes, 5);
  EXPECT_EQ(estimates.estimates[0].plan, "p");
  EXPECT_THAT(estimates.estimates[0].inputs, ElementsAre(FieldsAre("alibi", 6, -7)));
  EXPECT_THAT(estimates.estimates[0].lsh, FieldsAre(0, 0, "", "too long"));
  EXPECT_THAT(estimates.estimates[0].linear, FieldsAre(8, 9, "l", ""));
  EXPECT_EQ(estimates.chunk, 512);

  const ServerInfo info = Decode(Parse<v1::GetServerInfoResponse>(R"(
      version: "1" backend: "auto" isa: "avx2" compute_threads: 3 memory_budget_bytes: 4
      memory_reserved_bytes: 5 max_message_bytes: 6
      backends { name: "cpu" available: true instruction_sets { name: "avx2" in_use: true } }
      backends { name: "cudnn" reason: "no driver" }
      admission {
        max_open_calls: 1 max_calls_per_caller: 2 max_compute_bytes: 3 max_queued_requests: 4
        max_queue_delay_ms: 5 min_receive_bytes_per_second: 6 default_deadline_ms: 7
        max_deadline_ms: 8
      }
      caches {
        max_bytes: 9 max_bytes_per_caller: 10 max_caches_per_caller: 11 default_lease_ms: 12
        max_lease_ms: 13
      })"));
  ASSERT_TRUE(info.caches);
  EXPECT_EQ(info.caches->max_bytes, 9);
  EXPECT_EQ(info.caches->max_bytes_per_caller, 10);
  EXPECT_EQ(info.caches->max_caches_per_caller, 11);
  EXPECT_EQ(info.caches->default_lease.count(), 12);
  EXPECT_EQ(info.caches->max_lease.count(), 13);
  EXPECT_FALSE(Decode(v1::GetServerInfoResponse()).caches);
  EXPECT_EQ(info.admission.max_open_calls, 1);
  EXPECT_EQ(info.admission.max_calls_per_caller, 2);
  EXPECT_EQ(info.admission.max_compute_bytes, 3);
  EXPECT_EQ(info.admission.max_queued_requests, 4);
  EXPECT_EQ(info.admission.max_queue_delay.count(), 5);
  EXPECT_EQ(info.admission.min_receive_bytes_per_second, 6);
  EXPECT_EQ(info.admission.default_deadline.count(), 7);
  EXPECT_EQ(info.admission.max_deadline.count(), 8);
  EXPECT_EQ(info.version, "1");
  EXPECT_EQ(info.compute_threads, 3);
  EXPECT_EQ(info.max_message_bytes, 6);
  ASSERT_EQ(info.backends.size(), 2u);
  EXPECT_TRUE(info.backends[0].instruction_sets[0].in_use);
  EXPECT_EQ(info.backends[1].reason, "no driver");
}

TEST(TensorDeathTest, ValuesMustHaveTheTensorsType) {
  const Tensor tensor(DType::kFloat32, {2}, std::string(8, '\0'));
  EXPECT_THAT(tensor.values<float>(), ElementsAre(0.0f, 0.0f));
  EXPECT_DEATH(tensor.values<double>(), "dtype");
  EXPECT_DEATH(Tensor(DType::kFloat32, {2}, "short"), "bytes");
}

TEST(TensorTest, CopiesShareTheBytes) {
  const std::vector<Tensor> copies(2, Tensor(DType::kInt64, {1}, std::string(8, 'x')));
  EXPECT_EQ(copies[0].bytes().data(), copies[1].bytes().data());
  EXPECT_EQ(reinterpret_cast<uintptr_t>(copies[0].bytes().data()) % 8, 0u);
}

}  // namespace
}  // namespace rapt::client
