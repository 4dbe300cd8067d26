#include "client/cpp/model_stream.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <string>

#include "proto/rapt/v1/attention.pb.h"
#include "tests/support/text_message.h"

namespace rapt::client {
namespace {

using google::protobuf::util::MessageDifferencer;
using test::Bytes;
using test::Parse;
using testing::HasSubstr;
using Request = v1::LinearAttendRequest;
using Response = v1::LinearAttendResponse;

TensorView Halves(absl::string_view text) {
  return {DType::kFloat16, {static_cast<int64_t>(text.size()) / 2}, Bytes(text)};
}

constexpr int64_t kLengths[] = {1, 0};

ModelCall FullCall() {
  return {.inputs = {{"query", Halves("qq")},
                     {"past_state", Halves("ss")},
                     {"nonpad_kv_seqlen", View<int64_t>({2}, kLengths)}},
          .parameters = {{"q_num_heads", int64_t{4}},
                         {"update_rule", std::string("delta")},
                         {"feature_map", std::string("elu1")},
                         {"scale", 0.1},
                         {"is_causal", false},
                         {"seed", uint64_t{3}},
                         {"state_type", int64_t{11}},
                         {"priority", int64_t{6}}},
          .outputs = {"output", "present_state"}};
}

std::string ErrorOf(const ModelCall& call) {
  Request request;
  const absl::Status status = EncodeOperator(call, *Response::descriptor(), request);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  return std::string(status.message());
}

TEST(ModelStreamTest, SetsTheFieldsOfTheNames) {
  Request request;
  const absl::Status status = EncodeOperator(FullCall(), *Response::descriptor(), request);
  ASSERT_TRUE(status.ok()) << status;
  EXPECT_TRUE(MessageDifferencer::Equals(request, Parse<Request>(R"(
      query { dtype: FP16 shape: 1 data: "qq" } past_state { dtype: FP16 shape: 1 data: "ss" }
      nonpad_kv_seqlen: [1, 0] q_num_heads: 4 update_rule: UPDATE_DELTA
      feature_map: FEATURE_MAP_ELU1 scale: 0.1 is_causal: false seed: 3 state_type: FP64
      priority: 6 want_present_state: true)")))
      << request.DebugString();

  v1::LshAttendRequest lsh;
  ASSERT_TRUE(EncodeOperator({.inputs = {{"Q", Halves("qq")}}, .outputs = {"Y"}},
                             *v1::LshAttendResponse::descriptor(), lsh)
                  .ok());
  EXPECT_EQ(lsh.q().data(), "qq");
}

TEST(ModelStreamTest, NamesWhatTheMessageDoesNotTake) {
  ModelCall call = FullCall();
  call.inputs[0].second.shape = {3};
  EXPECT_EQ(ErrorOf(call), "query has shape [3] of FP16, which is 6 bytes, but its data has 2");
  EXPECT_EQ(ErrorOf({.inputs = {{"nonpad_kv_seqlen", Halves("kk")}}}),
            "nonpad_kv_seqlen has type FP16; it must be INT64");
  EXPECT_THAT(ErrorOf({.inputs = {{"Q", Halves("qq")}}}),
              HasSubstr("unknown input Q; it must be one of query, key, value, past_state"));
  EXPECT_EQ(ErrorOf({.outputs = {"present"}}),
            "unknown output present; it must be one of output, present_state, present_normalizer, "
            "relative_error");
  const struct {
    const char* name;
    ModelCall::Value value;
    const char* error;
  } kCases[] = {
      {"softcap", 1.0, "unknown parameter softcap; it must be one of q_num_heads, kv_num_heads"},
      {"query", 1.0, "unknown parameter query"},
      {"want_present_state", true, "unknown parameter want_present_state"},
      {"chunk_size", 0.5, "parameter chunk_size is 0.5; it must be of type int64"},
      {"seed", int64_t{-1}, "parameter seed is -1; it must be of type uint64"},
      {"scale", std::string("x"), "parameter scale is x; it must be of type double"},
      {"is_causal", int64_t{2}, "parameter is_causal is 2; it must be of type bool"},
      {"update_rule", std::string("favor"),
       "parameter update_rule is favor; it must be of type rapt.v1.UpdateRule"},
      {"state_type", int64_t{99},
       "parameter state_type is 99; it must be of type rapt.v1.DataType"},
  };
  for (const auto& [name, value, error] : kCases) {
    EXPECT_THAT(ErrorOf({.parameters = {{name, value}}}), HasSubstr(error));
  }
}

absl::StatusOr<ModelResult> DecodeText(const std::string& text) {
  Response response = Parse<Response>(text);
  return DecodeOperator(FullCall(), response);
}

TEST(ModelStreamTest, TakesTheOutputsOfTheCall) {
  const auto result = DecodeText(R"(
      output { dtype: FP16 shape: 1 data: "yy" } present_state { dtype: FP16 shape: 1 data: "ss" }
      present_normalizer { shape: 7 } backend: "cpu" plan: "p" timing { queue_us: 1 })");
  ASSERT_TRUE(result.ok()) << result.status();
  ASSERT_EQ(result->outputs.size(), 2U);
  EXPECT_EQ(static_cast<char>(result->outputs.at("output").bytes()[0]), 'y');
  EXPECT_EQ(static_cast<char>(result->outputs.at("present_state").bytes()[0]), 's');
  EXPECT_EQ(result->backend, "cpu");
  EXPECT_EQ(result->plan, "p");
}

TEST(ModelStreamTest, AnInconsistentResponseIsInternal) {
  const struct {
    std::string response;
    const char* message;
  } kCases[] = {
      {"", "no output"},
      {R"(output { shape: 1 data: "yy" })", "output has the unknown data type 0"},
      {R"(output { dtype: FP16 shape: 2 data: "yy" })", "output of shape [2] of FP16 in 2 bytes"},
      {R"(output { dtype: FP16 shape: 1 data: "yy" })", "no present_state"},
  };
  for (const auto& [response, message] : kCases) {
    const absl::Status status = DecodeText(response).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

}  // namespace
}  // namespace rapt::client
