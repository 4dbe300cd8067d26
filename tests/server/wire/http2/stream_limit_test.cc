#include "server/wire/http2/stream_limit.h"

#include <gtest/gtest.h>
#include <nghttp2/nghttp2.h>

#include <cstdint>
#include <optional>

namespace rapt {
namespace {

// What SETTINGS_MAX_CONCURRENT_STREAMS the frame has; -1 without a frame.
int64_t LimitIn(const std::optional<StreamLimit::Frame>& frame) {
  if (!frame) return -1;
  EXPECT_EQ((*frame)[2], 6);
  EXPECT_EQ((*frame)[3], NGHTTP2_SETTINGS);
  EXPECT_EQ((*frame)[10], NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS);
  return (*frame)[13] << 8 | (*frame)[14];
}

TEST(StreamLimitTest, FallsWithRefusalsAndDoublesWithoutThem) {
  StreamLimit limit(100);
  EXPECT_FALSE(limit.TakeRefusals());
  limit.OnRefusal();
  EXPECT_TRUE(limit.TakeRefusals());
  EXPECT_FALSE(limit.TakeRefusals());
  EXPECT_EQ(LimitIn(limit.Lower(30)), 30);
  EXPECT_EQ(LimitIn(limit.Lower(40)), -1);  // never raised by this
  EXPECT_EQ(LimitIn(limit.Raise()), -1);    // a call was refused since
  EXPECT_EQ(LimitIn(limit.Raise()), 60);
  EXPECT_EQ(LimitIn(limit.Raise()), 100);
  EXPECT_EQ(LimitIn(limit.Raise()), -1);
}

TEST(StreamLimitTest, TakesTheAcknowledgementsOfItsOwnFrames) {
  const FrameHead ack = {.length = 0, .type = NGHTTP2_SETTINGS, .flags = NGHTTP2_FLAG_ACK};
  StreamLimit limit(100);
  limit.Lower(1);
  EXPECT_FALSE(limit.IsAcknowledgement(ack)) << "nghttp2's own SETTINGS came first";
  EXPECT_FALSE(limit.IsAcknowledgement({.length = 6, .type = ack.type, .flags = ack.flags}));
  EXPECT_FALSE(limit.IsAcknowledgement({.type = ack.type, .flags = ack.flags, .stream = 1}));
  EXPECT_FALSE(limit.IsAcknowledgement({.type = ack.type}));
  EXPECT_TRUE(limit.IsAcknowledgement(ack));
  EXPECT_FALSE(limit.IsAcknowledgement(ack));
}

}  // namespace
}  // namespace rapt
