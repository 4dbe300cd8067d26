#include "server/protocols/oip/json_codec.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/buffer_pool.h"
#include "base/byte_slice.h"
#include "tests/support/fake_clock.h"

namespace rapt::oip {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kJsonBytes = 1 << 20;

class JsonCodecTest : public ::testing::Test {
 protected:
  absl::StatusOr<std::shared_ptr<JsonInfer>> Read(const std::string& json) {
    const auto size = static_cast<int64_t>(json.size());
    slice_ = {reinterpret_cast<const std::byte*>(json.data()), 0, size};
    return ReadJsonInfer({{{&slice_, 1}, 0}, size}, size, kJsonBytes, pool_);
  }

  test::FakeClock clock_;
  BufferPool pool_{int64_t{1} << 40, clock_};
  ByteSlice slice_ = {};
};

// Released buffers stay in the pool, which tells how many bytes were taken.
TEST_F(JsonCodecTest, ShapesWithoutNumbersTakeNoMoreMemoryThanTheJsonAllows) {
  for (const bool is_shape_first : {true, false}) {
    const std::string shape =
        absl::StrCat(R"("shape":[)", kJsonBytes / 2, R"(],"datatype":"FP64")");
    std::string json = R"({"inputs":[)";
    for (int n = 0; n < 64; ++n) {
      absl::StrAppend(&json, n > 0 ? "," : "", "{\"name\":\"", n, "\",",
                      is_shape_first ? shape + R"(,"data":[])" : R"("data":[],)" + shape, "}");
    }
    json += "]}";
    json.append(static_cast<size_t>(kJsonBytes) - json.size(), ' ');
    EXPECT_THAT(Read(json).status().message(), HasSubstr("has 0 values in data; its shape"));
    EXPECT_GE(pool_.idle_bytes(), kJsonBytes * kTypedBytesPerJsonByte);
    EXPECT_LE(pool_.idle_bytes(), 2 * kJsonBytes * kTypedBytesPerJsonByte);
  }
}

TEST_F(JsonCodecTest, NumbersOfTwoBytesHaveTheirPlaces) {
  std::string numbers = "1";
  for (int n = 1; n < 1000; ++n) numbers += ",1";
  const std::string input =
      absl::StrCat(R"({"datatype":"FP64","shape":[1000],"data":[)", numbers, "]}");
  const auto fields = Read(absl::StrCat(R"({"inputs":[)", input, ",", input, "]}"));
  ASSERT_TRUE(fields.ok()) << fields.status();
  for (const PooledBuffer& tensor : (*fields)->numbers) EXPECT_EQ(tensor.size(), 8000);
}

TEST_F(JsonCodecTest, AFieldOfAnInputComesOnce) {
  for (const char* field : {R"("shape":[1])", R"("datatype":"FP32")", R"("data":[1])"}) {
    const std::string json = absl::StrCat(
        R"({"inputs":[{"name":"Q","shape":[1],"datatype":"FP32","data":[1],)", field, "}]}");
    EXPECT_THAT(Read(json).status().message(), HasSubstr(" is given twice")) << json;
  }
}

// Clients add members of their own, and write null for what they leave out.
TEST_F(JsonCodecTest, WhatIsUnknownOrNullIsSkipped) {
  const std::string deep = std::string(50, '[') + R"({"inputs":[1]})" + std::string(50, ']');
  const std::string ignored[] = {R"("model_name":"other")", R"("x":null)",
                                 R"("x":{"name":"K","data":[{}]})", absl::StrCat("\"x\":", deep),
                                 R"("parameters":null)"};
  for (const std::string& member : ignored) {
    const std::string json =
        absl::StrCat(R"({)", member, R"(,"id":"7","inputs":[{)", member,
                     R"(,"name":"Q","shape":[2],"datatype":"FP32","data":[1,2]}],"outputs":[{)",
                     member, R"(,"name":"Y","datatype":"FP64","shape":[1]}]})");
    const auto fields = Read(json);
    ASSERT_TRUE(fields.ok()) << json << fields.status();
    const inference::ModelInferRequest& message = (*fields)->message;
    EXPECT_EQ(message.id(), "7");
    ASSERT_EQ(message.inputs_size(), 1);
    EXPECT_EQ(message.inputs(0).name(), "Q");
    EXPECT_EQ((*fields)->numbers.at(0).size(), 8);
    ASSERT_EQ(message.outputs_size(), 1);
    EXPECT_EQ(message.outputs(0).name(), "Y");
  }
  EXPECT_TRUE(Read(R"({"id":null,"inputs":null,"outputs":null,"parameters":null})").ok());
}

TEST_F(JsonCodecTest, ATensorsParametersThatAreUnknownMayHaveAnyValue) {
  for (const char* value : {"1", "null", "[1,{}]", R"({"a":[{"b":null}]})"}) {
    const auto fields = Read(absl::StrCat(
        R"({"inputs":[{"name":"Q","shape":[1],"datatype":"FP32","parameters":{"x":)", value,
        R"(,"content_type":"np"},"data":[1]}],"outputs":[{"name":"Y","parameters":{"x":)", value,
        R"(,"binary_data":true}}],"parameters":{"content_type":)", value, "}}"));
    ASSERT_TRUE(fields.ok()) << value << fields.status();
    EXPECT_TRUE((*fields)->binary.IsBinary(0));
    EXPECT_EQ(Read(absl::StrCat(R"({"parameters":{"x":)", value, "}}")).ok(),
              std::string(value) == "1");  // the codec refuses its name
  }
}

TEST_F(JsonCodecTest, AFieldOfAnotherTypeIsToldIt) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"id":7})", "the request has a field id of the wrong type; it must be a string"},
      {R"({"parameters":[]})", "field parameters of the wrong type; it must be an object"},
      {R"({"inputs":{}})", "field inputs of the wrong type; it must be an array of objects"},
      {R"({"inputs":[{"name":"Q","shape":1}]})",
       "input Q has a field shape of the wrong type; it must be an array of integers"},
      {R"({"inputs":[{"data":{}}]})", "input number 1 has a field data of the wrong type"},
      {R"({"outputs":[{"name":"Y","parameters":1}]})",
       "output Y has a field parameters of the wrong type"},
  };
  for (const auto& [json, error] : cases) {
    EXPECT_THAT(Read(json).status().message(), HasSubstr(error)) << json;
  }
}

// The memory of an answer is reserved before it exists, so the bound has to hold for every number.
TEST_F(JsonCodecTest, AnAnswerHasNoMoreBytesThanWereReserved) {
  const auto bits = [](auto value) {
    std::string text(sizeof(value), '\0');
    std::memcpy(text.data(), &value, sizeof(value));
    return text;
  };
  const std::pair<DType, std::string> longest[] = {
      {DType::kFloat64, bits(-std::numeric_limits<double>::max())},
      {DType::kFloat64, bits(-2.2250738585072014e-308)},
      {DType::kFloat32, bits(-std::numeric_limits<float>::max())},
      {DType::kFloat32, bits(-1.17549435e-38F)},
      {DType::kFloat32, bits(-1.00000384e+36F)},
      {DType::kFloat32, bits(-std::numeric_limits<float>::infinity())},
      {DType::kFloat16, bits(uint16_t{0x8001})},
      {DType::kBFloat16, bits(uint16_t{0x8001})},
      {DType::kInt64, bits(std::numeric_limits<int64_t>::min())},
      {DType::kInt32, bits(std::numeric_limits<int32_t>::min())},
      {DType::kInt8, bits(int8_t{-128})},
      {DType::kBool, bits(uint8_t{0})},
  };
  constexpr int64_t kNumbers = 10000;
  for (const auto& [dtype, element] : longest) {
    std::string bytes;
    for (int64_t n = 0; n < kNumbers; ++n) bytes += element;
    const auto fields = Read(R"({"id":"\u0001"})");
    ASSERT_TRUE(fields.ok());
    DecodedInfer decoded;
    decoded.id = "\x01";
    decoded.outputs.push_back({.name = "Y", .slot = Role::kY, .spec = {dtype, {kNumbers}}});
    const TensorSpec* const spec = &decoded.outputs[0].spec;
    decoded.encoding_bytes = (*fields)->EncodingBytes({&spec, 1}).value();
    Result result;
    result.outputs[Role::kY].bytes = {reinterpret_cast<const std::byte*>(bytes.data()),
                                      bytes.size()};
    const auto answer = EncodeJsonInfer((*fields)->binary, decoded, result, kJsonBytes);
    ASSERT_TRUE(answer.ok()) << answer.status();
    EXPECT_LE(static_cast<int64_t>(answer->json.size()), decoded.encoding_bytes) << element.size();
    EXPECT_GT(static_cast<int64_t>(answer->json.size()), kNumbers);
  }
}

TEST_F(JsonCodecTest, AnAnswerThatCannotFitIsRefusedBeforeItIsComputed) {
  const auto fields = Read("{}");
  ASSERT_TRUE(fields.ok());
  const auto status_of = [&](int64_t numbers) {
    const TensorSpec spec = {DType::kFloat32, {numbers}};
    const TensorSpec* const output = &spec;
    return (*fields)->EncodingBytes({&output, 1}).status();
  };
  EXPECT_TRUE(status_of(kJsonBytes / 2).ok());
  for (const int64_t numbers : {kJsonBytes / 2 + 1, int64_t{1} << 40, int64_t{1} << 60}) {
    EXPECT_THAT(status_of(numbers).message(), HasSubstr("ask for binary data")) << numbers;
  }
}

}  // namespace
}  // namespace rapt::oip
