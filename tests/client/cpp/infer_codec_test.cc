#include "client/cpp/infer_codec.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "tests/support/text_message.h"

namespace rapt::client {
namespace {

using google::protobuf::util::MessageDifferencer;
using test::Bytes;
using test::Parse;
using testing::ElementsAre;
using testing::HasSubstr;

LshCall SmallCall() {
  return {.q = TensorView{DType::kFloat16, {1, 1, 2, 1}, Bytes("qqqq")},
          .v = TensorView{DType::kFloat16, {1, 1, 2, 1}, Bytes("vvvv")},
          .chunk_length = 1};
}

absl::StatusOr<LshResult> Decode(const std::string& response, bool wants_buckets = true) {
  LshCall call = SmallCall();
  call.wants_buckets = wants_buckets;
  return DecodeLsh(call, Parse<inference::ModelInferResponse>(response));
}

TEST(InferCodecTest, AMinimalCallOfLshSetsOnlyItsFields) {
  const auto request = EncodeInfer(SmallCall());
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_TRUE(MessageDifferencer::Equals(*request, Parse<inference::ModelInferRequest>(R"(
      model_name: "lsh_attention"
      inputs { name: "QK" datatype: "FP16" shape: [1, 1, 2, 1] }
      inputs { name: "V" datatype: "FP16" shape: [1, 1, 2, 1] }
      raw_input_contents: ["qqqq", "vvvv"]
      parameters { key: "form" value { string_param: "reformer" } }
      parameters { key: "num_hashes" value { int64_param: 1 } }
      parameters { key: "num_buckets" value { int64_param: 0 } }
      parameters { key: "chunk_length" value { int64_param: 1 } }
      parameters { key: "is_causal" value { bool_param: false } }
      outputs { name: "Y" })")))
      << request->DebugString();
}

TEST(InferCodecTest, EncodesEveryFieldOfLsh) {
  LshCall call = SmallCall();
  call.k = TensorView{DType::kFloat16, {1, 1, 2, 1}, Bytes("kkkk")};
  call.rotations = TensorView{DType::kFloat32, {1, 1, 1, 1}, Bytes("rrrr")};
  call.key_lengths = {0x6161616161616161};
  call.form = LshForm::kSimple;
  call.num_hashes = 2;
  call.num_buckets = 4;
  call.chunks_before = 0;
  call.chunks_after = 5;
  call.causal = true;
  call.scale = 0.5;
  call.seed = uint64_t{1} << 63;
  call.wants_buckets = true;
  call.priority = 3;
  const auto request = EncodeInfer(call);
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_TRUE(MessageDifferencer::Equals(*request, Parse<inference::ModelInferRequest>(R"(
      model_name: "lsh_attention"
      inputs { name: "QK" datatype: "FP16" shape: [1, 1, 2, 1] }
      inputs { name: "K" datatype: "FP16" shape: [1, 1, 2, 1] }
      inputs { name: "V" datatype: "FP16" shape: [1, 1, 2, 1] }
      inputs { name: "rotations" datatype: "FP32" shape: [1, 1, 1, 1] }
      inputs { name: "nonpad_kv_seqlen" datatype: "INT64" shape: [1] }
      raw_input_contents: ["qqqq", "kkkk", "vvvv", "rrrr", "aaaaaaaa"]
      parameters { key: "form" value { string_param: "simple" } }
      parameters { key: "num_hashes" value { int64_param: 2 } }
      parameters { key: "num_buckets" value { int64_param: 4 } }
      parameters { key: "chunk_length" value { int64_param: 1 } }
      parameters { key: "chunks_before" value { int64_param: 0 } }
      parameters { key: "chunks_after" value { int64_param: 5 } }
      parameters { key: "is_causal" value { bool_param: true } }
      parameters { key: "scale" value { double_param: 0.5 } }
      parameters { key: "seed" value { uint64_param: 9223372036854775808 } }
      parameters { key: "priority" value { uint64_param: 3 } }
      outputs { name: "Y" } outputs { name: "buckets" })")))
      << request->DebugString();
}

TEST(InferCodecTest, DataMustMatchItsShape) {
  struct {
    const char* message;
    void (*change)(LshCall&);
  } const kCases[] = {
      {"QK has shape [3] of FP16, which is 6 bytes, but its data has 4",
       [](LshCall& c) { c.q.shape = {3}; }},
      {"K has shape [-1]; its axes must not be negative", [](LshCall& c) { c.k->shape = {-1}; }},
      {"V has shape [1] of FP16", [](LshCall& c) { c.v.shape = {1}; }},
      {"rotations has shape [1, 3] of FP16",
       [](LshCall& c) {
         c.rotations->shape = {1, 3};
       }},
  };
  for (const auto& c : kCases) {
    LshCall call = SmallCall();
    call.k = call.rotations = call.v;
    c.change(call);
    const absl::Status refused = EncodeInfer(call).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()), HasSubstr(c.message));
  }
}

TEST(InferCodecTest, ReadsOutputsInAnyOrder) {
  const auto result = Decode(R"(
      outputs { name: "buckets" datatype: "INT32" shape: [1, 1, 1, 2] }
      outputs { name: "Y" datatype: "FP64" shape: [1, 1, 1, 1] }
      raw_output_contents: ["\001\000\000\000\002\000\000\000", "yyyyyyyy"])");
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->y.dtype(), DType::kFloat64);
  EXPECT_EQ(result->y.shape(), (Shape{1, 1, 1, 1}));
  EXPECT_EQ(static_cast<char>(result->y.bytes()[0]), 'y');
  EXPECT_THAT(result->buckets->values<int32_t>(), ElementsAre(1, 2));
}

TEST(InferCodecTest, UnrequestedOutputsAreIgnored) {
  const auto result = Decode(R"(
      outputs { name: "Y" datatype: "FP16" shape: 1 } outputs { name: "buckets" }
      raw_output_contents: ["yy", ""])",
                             /*wants_buckets=*/false);
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->buckets);
}

TEST(InferCodecTest, AnInconsistentResponseIsInternal) {
  const struct {
    const char* response;
    const char* message;
  } kCases[] = {
      {"", "no Y"},
      {R"(outputs { name: "Y" datatype: "FP16" shape: 1 })", "each output must have its contents"},
      {R"(outputs { name: "Y" datatype: "FP16" shape: 1 } raw_output_contents: "yy")",
       "no buckets"},
      {R"(outputs { name: "Y" datatype: "BYTES" shape: 1 } raw_output_contents: "yy")",
       "Y has type 'BYTES'"},
      {R"(outputs { name: "Y" datatype: "FP16" shape: 2 } raw_output_contents: "yy")",
       "Y of shape [2] of FP16 in 2 bytes"},
      {R"(outputs { name: "Y" datatype: "FP16" shape: [-1, -1] } raw_output_contents: "yy")",
       "Y of shape [-1, -1] of FP16 in 2 bytes"},
  };
  for (const auto& [response, message] : kCases) {
    const absl::Status status = Decode(response).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

}  // namespace
}  // namespace rapt::client
