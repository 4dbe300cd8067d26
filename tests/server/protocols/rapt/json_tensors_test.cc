#include "server/protocols/rapt/json_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "proto/rapt/v1/attention.pb.h"

namespace rapt::native {
namespace {

using ::testing::HasSubstr;

const SteadyClock kClock;
BufferPool pool(1 << 24, kClock);

absl::StatusOr<JsonMessage> Read(absl::string_view json) {
  return ReadJson(*v1::DiagnoseRequest::descriptor(), json, pool);
}

v1::DiagnoseRequest Parse(absl::string_view json) {
  v1::DiagnoseRequest request;
  const absl::StatusOr<JsonMessage> message = Read(json);
  EXPECT_TRUE(message.ok()) << message.status();
  EXPECT_TRUE(message.ok() && request.ParseFromString(message->bytes().ToString())) << json;
  return request;
}

TEST(JsonTensorsTest, OtherFieldsAreThoseOfProtocolBuffers) {
  const v1::DiagnoseRequest request =
      Parse(R"({"call":{"attention":{"scale":0.5,"causal":true,"dropout":{"seed":"7"}},)"
            R"("keyLengths":[1,"2"],"scoreOutput":"WEIGHTS","priority":null}})");
  EXPECT_EQ(request.ShortDebugString(),
            "call { key_lengths: 1 key_lengths: 2 attention { scale: 0.5 causal: true dropout { "
            "seed: 7 } } score_output: WEIGHTS }");
  EXPECT_EQ(Parse("{}").ByteSizeLong(), 0u);
}

TEST(JsonTensorsTest, NumbersAreBinaryData) {
  const auto bytes = [](absl::string_view text) { return absl::HexStringToBytes(text); };
  const std::pair<const char*, std::string> cases[] = {
      {R"("datatype":"FP32","shape":[2],"data":[1,-2.5])", bytes("0000803f000020c0")},
      {R"("dtype":"FP32","shape":[2.0,1e0],"data":[1,-2.5])", bytes("0000803f000020c0")},
      {R"("dtype":"FP32","shape":["2",1],"data":[[[1],[-2.5]]])", bytes("0000803f000020c0")},
      {R"("dtype":1,"shape":[1],"data":[1])", bytes("0000803f")},
      {R"("name":"Q","data":[true,0],"datatype":"BOOL","shape":[2])", bytes("0100")},
      {R"("data":["NaN"],"shape":[1],"dtype":"BF16")", bytes("c07f")},
      {R"("dtype":"INT64","shape":[],"data":[-1])", bytes("ffffffffffffffff")},
      {R"("dtype":"FP16","shape":[0],"data":[])", ""},
      {R"("dtype":"FP32","shape":[1],"data":"AACAPw==")", bytes("0000803f")},
      {R"("data":"__-_","dtype":"FP32")", bytes("ffffbf")},  // as Protocol Buffers' parser takes it
      {R"("dtype":"FP32","data":null)", ""},
  };
  for (const auto& [json, want] : cases) {
    const v1::DiagnoseRequest request =
        Parse(absl::StrCat(R"({"call":{"q":{)", json, R"(},"keyLengths":[3]}})"));
    EXPECT_EQ(request.call().q().data(), want) << json;
    EXPECT_EQ(request.call().key_lengths(0), 3) << json;
  }
}

TEST(JsonTensorsTest, EachTensorHasItsOwnType) {
  const v1::AttendRequest call =
      Parse(R"({"call":{"q":{"data":[1],"dtype":"BOOL","shape":[1]},"past_key":{"dtype":"INT8"},)"
            R"("k":{"data":[2],"shape":[1],"dtype":"INT8"},)"
            R"("mask":{"dtype":"UINT8","shape":[2],"data":[0,255]},)"
            R"("v":{"dtype":"BOOL","shape":[2],"data":[0,1]}}})")
          .call();
  EXPECT_EQ(call.q().data(), std::string(1, '\1'));
  EXPECT_EQ(call.k().data(), std::string(1, '\2'));
  EXPECT_EQ(call.v().data(), std::string("\0\1", 2));
  EXPECT_EQ(call.mask().data(), std::string("\0\xff", 2));
  EXPECT_EQ(call.past_key().dtype(), v1::INT8);
}

// The kernels read numbers where the parser has put them.
TEST(JsonTensorsTest, DataIsContiguous) {
  const absl::StatusOr<JsonMessage> message =
      Read(R"({"call":{"q":{"dtype":"FP64","shape":[3],"data":[1,2,3]}}})");
  ASSERT_TRUE(message.ok()) << message.status();
  const absl::Span<const ByteSlice> slices = message->bytes().bytes.slices;
  ASSERT_EQ(slices.size(), 2u);
  EXPECT_EQ(slices[1].end - slices[1].begin, 24);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(slices[1].data) % alignof(double), 0u);
}

// A shape takes no memory for numbers that the JSON does not have.
TEST(JsonTensorsTest, MemoryIsBoundedByTheJson) {
  std::string json = R"({"call":{"q":{"dtype":"FP64","shape":[100001],"data":[1)";
  for (int n = 0; n < 100000; ++n) json += ",1";
  json += "]}}}";
  EXPECT_LE(Read(json)->bytes().size, MessageBytesOf(static_cast<int64_t>(json.size())));
  EXPECT_THAT(Read(R"({"call":{"q":{"dtype":"FP64","shape":[1000000000000],"data":[1]}}})")
                  .status()
                  .message(),
              HasSubstr("q has 1 values in data; its shape [1000000000000] needs 1000000000000"));
  EXPECT_THAT(
      Read(absl::StrCat(R"({"call":{"keyLengths":[1)", std::string(kMaxFieldsBytes, ' '), R"(]}})"))
          .status(),
      absl::OkStatus());
  std::string lengths = R"({"call":{"keyLengths":[1)";
  for (int64_t n = 0; n < kMaxFieldsBytes; n += 2) lengths += ",1";
  EXPECT_THAT(Read(lengths + "]}}").status().message(), HasSubstr("more than 1048576 bytes"));
}

TEST(JsonTensorsTest, ErrorsNameTheTensor) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("dtype":"FP16","shape":[1],"data":[65520])",
       "k has 65520 in data; it must be a number within"},
      {R"("dtype":"INT64","shape":[1],"data":[1.5])", "k has 1.5 in data; it must be an integer"},
      {R"("dtype":"FP32","data":[null])", "k has null in data"},
      {R"("dtype":"FP32","data":[{}])", "k has an object in data"},
      {R"("dtype":"UINT16","data":[1])", "k has dtype 'UINT16' and numbers in data"},
      {R"("data":[1])", "k has dtype '' and numbers in data"},
      {R"("dtype":99,"data":[1])", "k has dtype '99' and numbers in data"},
      {R"("dtype":"FP32","shape":[2],"data":[1])", "k has 1 values in data; its shape [2] needs 2"},
      {R"("dtype":"FP32","shape":[-1],"data":[1])", "k has"},
      {R"("dtype":"FP32","shape":[1.5],"data":[1])", "k has 1.5 in shape; it must have integers"},
      {R"("dtype":"FP32","shape":[9223372036854775808],"data":[1])",
       "k has 9223372036854775808 in shape"},
      {R"("dtype":"FP32","shape":[null],"data":[1])", "k has null in shape"},
      {R"("dtype":"FP32","data":"?")", "k has data that is no base64"},
      {R"("dtype":"FP32","dat":[])", "not a rapt.v1.DiagnoseRequest in JSON"},
      {R"("dtype":"FP33")", "rapt.v1.DataType; it must be DATA_TYPE_UNSPECIFIED (0), FP32 (1), "},
      {R"("name":[1])", "k has a name that is no string"},
      {R"("dtype":"FP32","shape":[1],"data":[1e400])", "number overflow"},
      {R"("dtype":"FP32","shape":[1],"shape":[1])", "call.k.shape is given twice"},
      {R"("dtype":"FP32","datatype":"FP32")", "dtype is given twice, by two of its names"},
      {R"("shape":[1]},"keyLengths":[1],"key_lengths":[2],"q":{)",
       "key_lengths is given twice, by two of its names"},
      {R"("shape":[1]},"k":{)", "call.k is given twice"},
  };
  for (const auto& [json, message] : cases) {
    const absl::Status status = Read(absl::StrCat(R"({"call":{"k":{)", json, "}}}")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << json;
    EXPECT_THAT(status.message(), HasSubstr(message)) << json;
  }
  for (const std::string& deep :
       {std::string(100, '['), R"({"call":{"q":{"dtype":"FP32","data":)" + std::string(100, '[')}) {
    EXPECT_THAT(Read(deep).status().message(), HasSubstr("nested more than 64 deep"));
  }
}

}  // namespace
}  // namespace rapt::native
