#include "server/wire/http2/frame_budget.h"

#include <gtest/gtest.h>
#include <nghttp2/nghttp2.h>

#include <chrono>
#include <string>

#include "tests/support/raw_http2.h"

namespace rapt {
namespace {

using test::Frame;

absl::Span<const uint8_t> Bytes(const std::string& text) {
  return {reinterpret_cast<const uint8_t*>(text.data()), text.size()};
}

class FrameBudgetTest : public ::testing::Test {
 protected:
  // Sends the frames `count` times or until one is refused. Returns how often they were taken.
  int64_t Send(const std::string& frames, int64_t count = 2 * FrameBudget::kCapacity) {
    for (int64_t n = 0; n < count; ++n) {
      budget_.Refill(now_);
      bool taken = true;
      reader_.Read(Bytes(frames), [&](const FrameHead& frame) {
        taken = budget_.OnFrame(frame) && taken;
        return true;
      });
      if (!taken) return n;
    }
    return count;
  }

  Instant now_ = Instant() + std::chrono::hours(1);
  FrameBudget budget_{now_};
  FrameReader reader_;
  const int64_t sent_preface_ = Send(NGHTTP2_CLIENT_MAGIC, 1);
};

TEST_F(FrameBudgetTest, FramesWithoutUseExhaustIt) {
  struct Case {
    const char* name;
    std::string frame;
  };
  constexpr int64_t kAll = FrameBudget::kCapacity;
  for (const Case& c : std::vector<Case>{
           {"ping", Frame(NGHTTP2_PING, 0, 0, "12345678")},
           {"settings", Frame(NGHTTP2_SETTINGS, 0, 0, "")},
           {"window update", Frame(NGHTTP2_WINDOW_UPDATE, 0, 0, test::BigEndian(1))},
           {"priority", Frame(NGHTTP2_PRIORITY, 0, 1, "12345")},
           {"unknown", Frame(0xEE, 0, 1, "what")},
           {"goaway", Frame(NGHTTP2_GOAWAY, 0, 0, "12345678")},
           {"empty data", Frame(NGHTTP2_DATA, 0, 1, "")},
           {"tiny data", Frame(NGHTTP2_DATA, 0, 1, "x")},
           {"reset", Frame(NGHTTP2_RST_STREAM, 0, 1, test::BigEndian(8))},
       }) {
    budget_ = FrameBudget(now_);
    // Tiny DATA earns a token for each kilobyte.
    EXPECT_NEAR(Send(c.frame), kAll, kAll / 500) << c.name;
  }
}

TEST_F(FrameBudgetTest, TimeRefillsIt) {
  const std::string ping = Frame(NGHTTP2_PING, 0, 0, "12345678");
  Send(ping);
  now_ += std::chrono::seconds(2);
  EXPECT_EQ(Send(ping), 2 * FrameBudget::kPerSecond - 1);
  now_ += std::chrono::hours(1);
  EXPECT_EQ(Send(ping), FrameBudget::kCapacity);
}

TEST_F(FrameBudgetTest, PayloadAndResponsesEarn) {
  const std::string update = Frame(NGHTTP2_WINDOW_UPDATE, 0, 0, test::BigEndian(1));
  const std::string data = Frame(NGHTTP2_DATA, 0, 1, std::string(16384, 'x'));
  EXPECT_EQ(Send(data + update), 2 * FrameBudget::kCapacity);
  Send(update);
  for (int n = 0; n < 1000; ++n) {
    budget_.EarnByResponse();
    ASSERT_EQ(Send(update, FrameBudget::kResponseEarns / 2), FrameBudget::kResponseEarns / 2);
  }
}

TEST_F(FrameBudgetTest, HeaderBlocksAndControlFramesHaveALimit) {
  const std::string block(16384, 'x');
  EXPECT_EQ(Send(Frame(NGHTTP2_HEADERS, 0, 1, block), 100), 100);
  EXPECT_EQ(Send(Frame(NGHTTP2_CONTINUATION, 0, 1, block), 100), 1);
  for (int n = 0; n < 3; ++n) {
    EXPECT_EQ(Send(Frame(NGHTTP2_HEADERS, 0, 1, ""), 1), 1);
    EXPECT_EQ(Send(Frame(NGHTTP2_CONTINUATION, 0, 1, ""), 100), FrameBudget::kMaxContinuations);
  }
  EXPECT_EQ(Send(Frame(NGHTTP2_GOAWAY, 0, 0, block + "x")), 0);
}

TEST_F(FrameBudgetTest, MessagesPayForTheirFrames) {
  const std::string tiny = Frame(NGHTTP2_DATA, 0, 1, "message");
  for (int64_t n = 0; n < 2 * FrameBudget::kCapacity; ++n) {
    ASSERT_EQ(Send(tiny, 1), 1) << n;
    budget_.EarnByMessage();
  }
}

}  // namespace
}  // namespace rapt
