#include "client/cpp/linear_codec.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <string>

#include "tests/support/text_message.h"

namespace rapt::client {
namespace {

using google::protobuf::util::MessageDifferencer;
using test::Bytes;
using test::Parse;
using testing::HasSubstr;

TensorView Halves(absl::string_view text) {
  return {DType::kFloat16, {static_cast<int64_t>(text.size()) / 2}, Bytes(text)};
}

LinearCall FullCall() {
  return {.query = Halves("qq"),
          .key = Halves("kk"),
          .value = Halves("vv"),
          .past_state = Halves("ss"),
          .decay = Halves("dd"),
          .beta = Halves("bb"),
          .projection = Halves("pp"),
          .past_normalizer = Halves("nn"),
          .key_lengths = {1},
          .query_heads = 4,
          .kv_heads = 2,
          .update_rule = UpdateRule::kGated,
          .scale = 0.5,
          .chunk_size = 8,
          .causal = false,
          .feature_map = FeatureMap::kFavor,
          .normalize = true,
          .num_features = 16,
          .seed = 3,
          .state_type = DType::kFloat64,
          .error_rows = 5,
          .want_present_state = true,
          .want_present_normalizer = true,
          .priority = 6};
}

constexpr char kTokens[] = R"(
    query { dtype: FP16 shape: 1 data: "qq" } key { dtype: FP16 shape: 1 data: "kk" }
    value { dtype: FP16 shape: 1 data: "vv" } decay { dtype: FP16 shape: 1 data: "dd" }
    beta { dtype: FP16 shape: 1 data: "bb" } nonpad_kv_seqlen: 1
    want_present_state: true want_present_normalizer: true)";

TEST(LinearCodecTest, EncodesEveryField) {
  const auto request = Encode(FullCall());
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_TRUE(
      MessageDifferencer::Equals(*request, Parse<v1::LinearAttendRequest>(std::string(kTokens) + R"(
      past_state { dtype: FP16 shape: 1 data: "ss" } projection { dtype: FP16 shape: 1 data: "pp" }
      past_normalizer { dtype: FP16 shape: 1 data: "nn" }
      q_num_heads: 4 kv_num_heads: 2 update_rule: UPDATE_GATED scale: 0.5 chunk_size: 8
      is_causal: false feature_map: FEATURE_MAP_FAVOR normalize: true num_features: 16 seed: 3
      state_type: FP64 error_rows: 5 priority: 6)")))
      << request->DebugString();
}

TEST(LinearCodecTest, LaterMessagesOfAStreamHaveOnlyTokens) {
  const auto request = EncodeTokens(FullCall());
  ASSERT_TRUE(request.ok()) << request.status();
  EXPECT_TRUE(MessageDifferencer::Equals(*request, Parse<v1::LinearAttendRequest>(kTokens)))
      << request->DebugString();
}

TEST(LinearCodecTest, DataMustMatchItsShape) {
  LinearCall call = FullCall();
  call.projection->shape = {3};
  const absl::Status refused = Encode(call).status();
  EXPECT_EQ(refused.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(refused.message()),
              HasSubstr("projection has shape [3] of FP16, which is 6 bytes, but its data has 2"));
}

absl::StatusOr<LinearResult> DecodeText(const std::string& response, const LinearCall& call) {
  return Decode(call, Parse<v1::LinearAttendResponse>(response));
}

TEST(LinearCodecTest, ReadsAWholeResult) {
  const auto result = DecodeText(R"(
      output { dtype: FP16 shape: 1 data: "yy" } present_state { dtype: FP16 shape: 1 data: "ss" }
      present_normalizer { dtype: FP16 shape: [1, 1] data: "nn" }
      relative_error { dtype: FP32 shape: 1 data: "\000\000\000\077" }
      backend: "cpu" plan: "p" timing { queue_us: 1 compute_us: 2 })",
                                 FullCall());
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_EQ(static_cast<char>(result->output.bytes()[0]), 'y');
  EXPECT_EQ(static_cast<char>(result->present_state->bytes()[0]), 's');
  EXPECT_EQ(result->present_normalizer->shape(), (Shape{1, 1}));
  EXPECT_EQ(result->relative_error, 0.5);
  EXPECT_EQ(result->backend, "cpu");
  EXPECT_EQ(result->plan, "p");
  EXPECT_EQ(result->queue_time.count(), 1);
  EXPECT_EQ(result->compute_time.count(), 2);
}

TEST(LinearCodecTest, UnrequestedOutputsAreIgnored) {
  const auto result =
      DecodeText(R"(output { dtype: FP16 shape: 1 data: "yy" } present_state { shape: 7 })", {});
  ASSERT_TRUE(result.ok()) << result.status();
  EXPECT_FALSE(result->present_state);
}

TEST(LinearCodecTest, AnInconsistentResponseIsInternal) {
  const std::string output = R"(output { dtype: FP16 shape: 1 data: "yy" })";
  const std::string state = output + R"( present_state { dtype: FP16 shape: 1 data: "ss" })";
  const struct {
    std::string response;
    const char* message;
  } kCases[] = {
      {"", "no output"},
      {R"(output { shape: 1 data: "yy" })", "output has the unknown data type 0"},
      {R"(output { dtype: FP16 shape: 2 data: "yy" })", "output of shape [2] of FP16 in 2 bytes"},
      {output, "no present_state"},
      {state, "no present_normalizer"},
      {state + R"( present_normalizer { dtype: FP16 shape: 1 data: "nn" }
                   relative_error { dtype: FP16 shape: 1 data: "ee" })",
       "relative_error must be one FP32"},
  };
  for (const auto& [response, message] : kCases) {
    const absl::Status status = DecodeText(response, FullCall()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
    EXPECT_THAT(std::string(status.message()), HasSubstr(message));
  }
}

}  // namespace
}  // namespace rapt::client
