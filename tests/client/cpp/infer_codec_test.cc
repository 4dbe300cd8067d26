#include "client/cpp/infer_codec.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "tests/support/text_message.h"

namespace rapt::client {
namespace {

using google::protobuf::util::MessageDifferencer;
using test::Bytes;
using test::Parse;
using testing::ElementsAre;
using testing::HasSubstr;

TensorView Halves(const char* bytes) { return {DType::kFloat16, {1, 1, 2, 1}, Bytes(bytes)}; }

absl::StatusOr<ModelResult> Decode(const std::string& response,
                                   std::vector<std::string> outputs = {"Y", "buckets"}) {
  return DecodeInfer({.outputs = std::move(outputs)},
                     Parse<inference::ModelInferResponse>(response));
}

TEST(InferCodecTest, EncodesACall) {
  const auto request = EncodeInfer({.model = "encoder",
                                    .inputs = {{"query", Halves("qqqq")}, {"mask", Halves("mmmm")}},
                                    .parameters = {{"is_causal", false},
                                                   {"key_block", -1},
                                                   {"priority", uint64_t{3}},
                                                   {"scale", 0.5},
                                                   {"layout", "BHSD"}},
                                    .outputs = {"Y", "weights"}});
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_TRUE(MessageDifferencer::Equals(*request, Parse<inference::ModelInferRequest>(R"(
      model_name: "encoder"
      inputs { name: "query" datatype: "FP16" shape: [1, 1, 2, 1] }
      inputs { name: "mask" datatype: "FP16" shape: [1, 1, 2, 1] }
      raw_input_contents: ["qqqq", "mmmm"]
      parameters { key: "is_causal" value { bool_param: false } }
      parameters { key: "key_block" value { int64_param: -1 } }
      parameters { key: "priority" value { uint64_param: 3 } }
      parameters { key: "scale" value { double_param: 0.5 } }
      parameters { key: "layout" value { string_param: "BHSD" } }
      outputs { name: "Y" } outputs { name: "weights" })")))
      << request->DebugString();
}

TEST(InferCodecTest, DataMustMatchItsShape) {
  const struct {
    const char* message;
    Shape shape;
  } kCases[] = {{"X has shape [3] of FP16, which is 6 bytes, but its data has 4", {3}},
                {"X has shape [-1]; its axes must not be negative", {-1}}};
  for (const auto& [message, shape] : kCases) {
    TensorView x = Halves("xxxx");
    x.shape = shape;
    const absl::Status refused = EncodeInfer({.model = "m", .inputs = {{"X", x}}}).status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(refused.message()), HasSubstr(message));
  }
}

TEST(InferCodecTest, ReadsOutputsInAnyOrder) {
  const auto result = Decode(R"(
      outputs { name: "buckets" datatype: "INT32" shape: [1, 1, 1, 2] }
      outputs { name: "Y" datatype: "FP64" shape: [1, 1, 1, 1] }
      raw_output_contents: ["\001\000\000\000\002\000\000\000", "yyyyyyyy"])");
  ASSERT_TRUE(result.ok()) << result.status();
  const Tensor& y = result->outputs.at("Y");
  EXPECT_EQ(y.dtype(), DType::kFloat64);
  EXPECT_EQ(y.shape(), (Shape{1, 1, 1, 1}));
  EXPECT_EQ(static_cast<char>(y.bytes()[0]), 'y');
  EXPECT_THAT(result->outputs.at("buckets").values<int32_t>(), ElementsAre(1, 2));
}

TEST(InferCodecTest, WithoutNamesAllOutputsAreReturned) {
  const auto result = Decode(R"(
      outputs { name: "Z" datatype: "FP16" shape: 1 } raw_output_contents: "zz")",
                             {});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(result->outputs.size(), 1u);
  EXPECT_EQ(result->outputs.count("Z"), 1u);
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
      {R"(outputs { name: "Z" datatype: "FP16" shape: 1 } raw_output_contents: "yy")",
       "Z was not asked for"},
      {R"(outputs { name: "Y" datatype: "FP16" shape: 1 } outputs { name: "Y" datatype: "FP16" shape: 1 }
          raw_output_contents: ["yy", "yy"])",
       "Y comes twice"},
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
