#include "server/wire/http2/keepalive.h"

#include <gtest/gtest.h>

#include <chrono>

namespace rapt {
namespace {

using std::chrono::minutes;
using std::chrono::seconds;
using Action = Keepalive::Action;

constexpr Instant kStart{};

TEST(KeepaliveTest, PingsASilentCallerAndClosesIfNothingFollows) {
  Keepalive keepalive(kStart);
  EXPECT_EQ(keepalive.OnTick(kStart + seconds(119)), Action::kNone);
  EXPECT_EQ(keepalive.OnTick(kStart + seconds(120)), Action::kPing);
  EXPECT_EQ(keepalive.OnTick(kStart + seconds(139)), Action::kNone);
  EXPECT_EQ(keepalive.OnTick(kStart + seconds(140)), Action::kClose);
  keepalive.OnRead(kStart + seconds(140));
  EXPECT_EQ(keepalive.OnTick(kStart + seconds(141)), Action::kNone);
  EXPECT_EQ(keepalive.OnTick(kStart + seconds(260)), Action::kPing);
}

TEST(KeepaliveTest, TwoEarlyPingsWithoutCallsAreAllowedUntilAResponse) {
  Keepalive keepalive(kStart);
  Instant now = kStart;
  const auto ping = [&] { return keepalive.OnPing(now += seconds(1), /*has_calls=*/false); };
  EXPECT_TRUE(ping());  // the first one is never early
  EXPECT_TRUE(ping());
  EXPECT_TRUE(ping());
  EXPECT_FALSE(ping());
  keepalive.OnResponse();
  for (int n = 0; n < 3; ++n) EXPECT_TRUE(ping()) << n;
  EXPECT_FALSE(ping());
}

TEST(KeepaliveTest, PingsWithCallsAfterDataOrLaterAreNoStrikes) {
  Keepalive keepalive(kStart);
  Instant now = kStart;
  for (int n = 0; n < 9; ++n) EXPECT_TRUE(keepalive.OnPing(now += seconds(1), true));
  for (int n = 0; n < 9; ++n) {
    keepalive.OnActivity();
    EXPECT_TRUE(keepalive.OnPing(now += seconds(1), false));
  }
  for (int n = 0; n < 9; ++n) EXPECT_TRUE(keepalive.OnPing(now += minutes(5), false));
}

}  // namespace
}  // namespace rapt
