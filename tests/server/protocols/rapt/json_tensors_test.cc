#include "server/protocols/rapt/json_tensors.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "proto/rapt/v1/attention.pb.h"

namespace rapt::native {
namespace {

using ::testing::HasSubstr;

absl::StatusOr<std::string> Rewrite(absl::string_view json) {
  return WithBinaryTensors(*v1::DiagnoseRequest::descriptor(), json);
}

TEST(JsonTensorsTest, OtherJsonStaysAsItIs) {
  for (const char* json :
       {"{}",
        R"({"call":{"attention":{"scale":0.1,"causal":true,"softcap":1e-3},"keyLengths":[1,-2]}})",
        R"({"call":{"q":{"data":"AAAA","dtype":"FP32","shape":["1",1]}}})",
        R"({"data":[1,null,{"datatype":"x","name":1}],"é\"":"\u0001"})"}) {
    EXPECT_EQ(Rewrite(json).value(), json);
  }
}

TEST(JsonTensorsTest, NumbersBecomeBase64) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("datatype":"FP32","data":[1,-2.5])", R"("dtype":"FP32","data":"AACAPwAAIMA=")"},
      {R"("dtype":"FP32","data":[[[1],[-2.5]]])", R"("dtype":"FP32","data":"AACAPwAAIMA=")"},
      {R"("name":"Q","data":[true,0],"datatype":"BOOL")", R"("data":"AQA=","dtype":"BOOL")"},
      {R"("data":["NaN"],"shape":[1],"dtype":"BF16")",
       R"("data":"wH8=","shape":[1],"dtype":"BF16")"},
      {R"("dtype":"INT64","data":[-1])", R"("dtype":"INT64","data":"//////////8=")"},
      {R"("dtype":"FP16","data":[])", R"("dtype":"FP16","data":"")"},
  };
  for (const auto& [json, want] : cases) {
    EXPECT_EQ(Rewrite(absl::StrCat(R"({"call":{"q":{)", json, "}}}")).value(),
              absl::StrCat(R"({"call":{"q":{)", want, "}}}"));
  }
}

TEST(JsonTensorsTest, EachTensorHasItsOwnType) {
  EXPECT_EQ(Rewrite(R"({"call":{"q":{"data":[1],"dtype":"BOOL"},"past_key":{"dtype":"INT8"},)"
                    R"("k":{"data":[2],"dtype":"INT8"},"v":{"dtype":"BOOL","data":[0]}}})")
                .value(),
            R"({"call":{"q":{"data":"AQ==","dtype":"BOOL"},"past_key":{"dtype":"INT8"},)"
            R"("k":{"data":"Ag==","dtype":"INT8"},"v":{"dtype":"BOOL","data":"AA=="}}})");
}

TEST(JsonTensorsTest, TheTextIsBounded) {
  std::string json = R"({"call":{"q":{"dtype":"FP64","data":[1)";
  for (int n = 0; n < 100000; ++n) json += ",1";
  json += "]}}}";
  EXPECT_LE(Rewrite(json)->size(), json.size() * kTextBytesPerJsonByte);
}

TEST(JsonTensorsTest, ErrorsNameTheTensor) {
  const std::pair<const char*, const char*> cases[] = {
      {R"("dtype":"FP16","data":[65520])", "k has 65520 in data; it must be a number within"},
      {R"("dtype":"INT64","data":[1.5])", "k has 1.5 in data; it must be an integer"},
      {R"("dtype":"FP32","data":[null])", "k has null in data"},
      {R"("dtype":"FP32","data":[{}])", "k has an object in data"},
      {R"("dtype":"UINT8","data":[1])", "k has dtype 'UINT8' and numbers in data"},
      {R"("data":[1])", "k has dtype '' and numbers in data"},
      {R"("name":[1])", "k has a name that is no string"},
      {R"("dtype":"FP32","data":[1e400])", "number overflow"},
  };
  for (const auto& [json, message] : cases) {
    const absl::Status status = Rewrite(absl::StrCat(R"({"call":{"k":{)", json, "}}}")).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << json;
    EXPECT_THAT(status.message(), HasSubstr(message)) << json;
  }
  for (const std::string& deep :
       {std::string(100, '['), R"({"call":{"q":{"dtype":"FP32","data":)" + std::string(100, '[')}) {
    EXPECT_THAT(Rewrite(deep).status().message(), HasSubstr("levels"));
  }
}

}  // namespace
}  // namespace rapt::native
