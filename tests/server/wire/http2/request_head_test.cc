#include "server/wire/http2/request_head.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <optional>
#include <string>

namespace rapt {
namespace {

using std::chrono::nanoseconds;
using ::testing::ElementsAre;

std::optional<nanoseconds> TimeoutOf(const std::string& value) {
  RequestHead head;
  head.Add("grpc-timeout", value);
  return head.timeout();
}

TEST(RequestHeadTest, ReadsTimeouts) {
  EXPECT_EQ(RequestHead().timeout(), nanoseconds::max());
  EXPECT_EQ(TimeoutOf("2H"), std::chrono::hours(2));
  EXPECT_EQ(TimeoutOf("3M"), std::chrono::minutes(3));
  EXPECT_EQ(TimeoutOf("0S"), nanoseconds(0));
  EXPECT_EQ(TimeoutOf("12345678m"), std::chrono::milliseconds(12345678));
  EXPECT_EQ(TimeoutOf("7u"), std::chrono::microseconds(7));
  EXPECT_EQ(TimeoutOf("99999999n"), nanoseconds(99999999));
  EXPECT_EQ(TimeoutOf("99999999H"), nanoseconds::max());  // more than fits
  for (const char* bad : {"", "S", "1", "1s", "-1S", "+1S", "1.5S", "123456789S", " 1S", "1S "}) {
    EXPECT_EQ(TimeoutOf(bad), std::nullopt) << bad;
  }
}

TEST(RequestHeadTest, KnowsGrpcByItsContentType) {
  const auto is_grpc = [](const std::string& type) {
    RequestHead head;
    head.Add("content-type", type);
    return head.is_grpc();
  };
  for (const char* type : {"application/grpc", "application/grpc+proto", "application/grpc;x=y"}) {
    EXPECT_TRUE(is_grpc(type)) << type;
  }
  for (const char* type : {"", "application/grpc-web", "application/json", "application/grpcs"}) {
    EXPECT_FALSE(is_grpc(type)) << type;
  }
}

TEST(RequestHeadTest, KeepsRepeatedValues) {
  RequestHead head;
  head.Add("authorization", "Bearer a");
  head.Add("authorization", "Bearer b");
  head.Add("traceparent", "00-x");
  const CallHeaders headers = head.ToCallHeaders();
  EXPECT_THAT(headers.authorization, ElementsAre("Bearer a", "Bearer b"));
  EXPECT_THAT(headers.traceparent, ElementsAre("00-x"));
}

TEST(RequestHeadTest, CountsBytesAndKeepsNoMoreThanTheLimit) {
  RequestHead head;
  head.Add("a", std::string(1000, 'x'));
  EXPECT_EQ(head.bytes(), 1033);
  EXPECT_FALSE(head.is_too_large());
  for (int n = 0; n < 20; ++n) head.Add("authorization", std::string(1000, 'x'));
  EXPECT_TRUE(head.is_too_large());
  EXPECT_LE(head.ToCallHeaders().authorization.size(), 16u);
}

TEST(RequestHeadTest, PercentEncodesWhatAHeaderCannotCarry) {
  EXPECT_EQ(PercentEncode("plain text, 100"), "plain text, 100");
  EXPECT_EQ(PercentEncode("50%\n\xC3\xA4"), "50%25%0A%C3%A4");
}

}  // namespace
}  // namespace rapt
