#include "client/cpp/cache_codec.h"

#include <gmock/gmock.h>
#include <google/protobuf/util/message_differencer.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>
#include <vector>

#include "tests/support/text_message.h"

namespace rapt::client {
namespace {

using google::protobuf::util::MessageDifferencer;
using test::Bytes;
using test::Parse;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;

constexpr int64_t kNoLimit = int64_t{1} << 30;

// [1, 1, 1] of two printable bytes.
TensorView Half(absl::string_view text) { return {DType::kFloat16, {1, 1, 1}, Bytes(text)}; }

template <typename Message>
Message Parsed(const absl::StatusOr<RequestMessage>& encoded) {
  Message message;
  EXPECT_TRUE(encoded.ok()) << encoded.status();
  if (!encoded.ok()) return message;
  std::string bytes;
  for (const RequestMessage::Piece& piece : encoded->pieces()) {
    bytes += piece.bytes;
    bytes.append(reinterpret_cast<const char*>(piece.payload.data()), piece.payload.size());
  }
  EXPECT_EQ(encoded->size(), static_cast<int64_t>(bytes.size()));
  EXPECT_TRUE(message.ParseFromString(bytes));
  return message;
}

template <typename Message>
void ExpectEquals(const Message& got, const std::string& want) {
  EXPECT_TRUE(MessageDifferencer::Equals(got, Parse<Message>(want))) << got.ShortDebugString();
}

std::vector<const std::byte*> PayloadsOf(const RequestMessage& message) {
  std::vector<const std::byte*> payloads;
  for (const RequestMessage::Piece& piece : message.pieces()) {
    if (!piece.payload.empty()) payloads.push_back(piece.payload.data());
  }
  return payloads;
}

TEST(CacheCodecTest, EncodesEveryFieldOfAttend) {
  const CacheAttendCall call{.layer = 3,
                             .q = Half("qq"),
                             .k = Half("kk"),
                             .v = Half("vv"),
                             .head_sink = Half("ss"),
                             .scale = 0.5,
                             .softcap = 2,
                             .window = {.left = 7, .right = 1},
                             .wants_lse = true,
                             .output = DType::kFloat32,
                             .share_prefix = false,
                             .partial_success = true,
                             .priority = 4};
  const std::vector<CacheItem> items = {{nullptr, 1, 0, 9}, {nullptr, 0, 1}};
  ExpectEquals(Parsed<v1::AttendCachedRequest>(
                   EncodeCachedAttend(items, {{"a", 1, 5}, {"b", 2, 6}}, call, kNoLimit)),
               R"(layer: 3
         items { cache: "a" rows: 1 new_tokens: 0 at: 5 generation: 1 position: 9 }
         items { cache: "b" rows: 0 new_tokens: 1 at: 6 generation: 2 }
         q { dtype: FP16 shape: [ 1, 1, 1 ] data: "qq" } k { dtype: FP16 shape: [ 1, 1, 1 ] data: "kk" }
         v { dtype: FP16 shape: [ 1, 1, 1 ] data: "vv" } scale: 0.5 softcap: 2 window { left: 7 right: 1 }
         want_lse: true output: FP32 share_prefix: SHARE_PREFIX_NEVER return_partial_success: true
         head_sink { dtype: FP16 shape: [ 1, 1, 1 ] data: "ss" } priority: 4)");
  ExpectEquals(Parsed<v1::AttendCachedRequest>(EncodeCachedAttend({{nullptr, 1, 0}}, {{"a", 1, 0}},
                                                                  {.q = Half("qq")}, kNoLimit)),
               R"(items { cache: "a" rows: 1 at: 0 generation: 1 }
                  q { dtype: FP16 shape: [ 1, 1, 1 ] data: "qq" })");
}

TEST(CacheCodecTest, EncodesEveryFieldOfAppendAndCreate) {
  ExpectEquals(
      Parsed<v1::AppendRequest>(
          EncodeAppend({{3, Half("kk"), Half("vv")}, {4, Half("KK"), Half("VV")}},
                       {{"a", 2, 5}, {"a", 2, 0}}, kNoLimit)),
      R"(parts { cache: "a" layer: 3 at: 5 generation: 2 k { dtype: FP16 shape: [ 1, 1, 1 ] data: "kk" }
                 v { dtype: FP16 shape: [ 1, 1, 1 ] data: "vv" } }
         parts { cache: "a" layer: 4 at: 0 generation: 2 k { dtype: FP16 shape: [ 1, 1, 1 ] data: "KK" }
                 v { dtype: FP16 shape: [ 1, 1, 1 ] data: "VV" } })");
  ExpectEquals(Encode(CacheOptions{.shapes = {{1, 2, 3, 4, 5, 6}, {.layers = 7}},
                                   .dtype = DType::kBFloat16,
                                   .name = "n",
                                   .reserve_tokens = 8,
                                   .lease = std::chrono::milliseconds(9),
                                   .first_position = 10}),
               R"(name: "n" shapes { layers: 1 kv_heads: 2 head_size: 3 value_head_size: 4
                                     keep_first: 5 keep_last: 6 } shapes { layers: 7 }
                  dtype: BF16 reserve_tokens: 8 lease_ms: 9 first_position: 10)");
}

TEST(CacheCodecTest, RefersToLargeTensors) {
  const std::string k(8192, 'k'), v(8192, 'v');
  const TensorView keys{DType::kFloat16, {4096, 1, 1}, Bytes(k)};
  const TensorView values{DType::kFloat16, {4096, 1, 1}, Bytes(v)};
  const auto append = EncodeAppend({{0, keys, values}}, {{"a", 1, 0}}, kNoLimit);
  ASSERT_TRUE(append.ok()) << append.status();
  EXPECT_THAT(PayloadsOf(*append), ElementsAre(Bytes(k).data(), Bytes(v).data()));
  EXPECT_EQ(Parsed<v1::AppendRequest>(append).parts(0).v().data(), v);
  const auto attend =
      EncodeCachedAttend({{nullptr, 0, 4096}}, {{"a", 1, 0}}, {.k = keys, .v = values}, kNoLimit);
  ASSERT_TRUE(attend.ok()) << attend.status();
  EXPECT_THAT(PayloadsOf(*attend), ElementsAre(Bytes(k).data(), Bytes(v).data()));
}

TEST(CacheCodecTest, LimitsTheSizeOfMessages) {
  const auto append = EncodeAppend({{0, Half("kk"), Half("vv")}}, {{"a", 1, 0}}, kNoLimit);
  ASSERT_TRUE(append.ok()) << append.status();
  EXPECT_TRUE(EncodeAppend({{0, Half("kk"), Half("vv")}}, {{"a", 1, 0}}, append->size()).ok());
  EXPECT_TRUE(absl::IsResourceExhausted(
      EncodeAppend({{0, Half("kk"), Half("vv")}}, {{"a", 1, 0}}, append->size() - 1).status()));
  EXPECT_TRUE(absl::IsResourceExhausted(
      EncodeCachedAttend({{nullptr, 1, 0}}, {{"a", 1, 0}}, {.q = Half("qq")}, 10).status()));
}

TEST(CacheCodecTest, MalformedResponsesAreErrors) {
  const auto message = [](const auto& decoded) { return std::string(decoded.status().message()); };
  const CacheAttendCall call{.wants_lse = true};
  const auto attend = [&](const std::string& text) {
    return Decode(1, call, Parse<v1::AttendCachedResponse>(text));
  };
  const std::string y = R"(items {} y { dtype: FP16 shape: 1 data: "yy" })";
  EXPECT_TRUE(attend(y + R"(lse { dtype: FP32 shape: 1 data: "4444" })").ok());
  EXPECT_THAT(message(attend(y)), HasSubstr("malformed response from server: no lse"));
  EXPECT_THAT(message(attend("items {}")), HasSubstr("no y"));
  EXPECT_THAT(message(attend("")), HasSubstr("0 results of 1"));
  EXPECT_THAT(message(attend(R"(items {} y { dtype: FP16 shape: 2 data: "yy" })")),
              HasSubstr("y of"));
  EXPECT_THAT(message(Decode(2, Parse<v1::AppendResponse>("results {}"))),
              HasSubstr("1 results of 2"));
  EXPECT_TRUE(absl::IsInternal(Decode(Parse<v1::Cache>("dtype: 99")).status()));
}

TEST(CacheCodecTest, DecodesWhatHappenedToItems) {
  const auto results = Decode(2, Parse<v1::AppendResponse>(R"(
      results { length: 7 applied_before: true }
      results { code: 10 message: "other tokens" reason: "conflict" length: 3 })"));
  ASSERT_TRUE(results.ok()) << results.status();
  ASSERT_THAT(*results, SizeIs(2));
  EXPECT_TRUE((*results)[0].status.ok());
  EXPECT_EQ((*results)[0].length, 7);
  EXPECT_TRUE((*results)[0].applied_before);
  EXPECT_TRUE(absl::IsAborted((*results)[1].status));
  EXPECT_EQ((*results)[1].status.message(), "other tokens");
  EXPECT_EQ(ReasonOf((*results)[1].status), "conflict");
}

}  // namespace
}  // namespace rapt::client
