#include "base/range.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>
#include <string>

namespace rapt {
namespace {

constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
constexpr int64_t kSmallest = std::numeric_limits<int64_t>::min();

std::string Message(int64_t value, IntegerRange range) {
  return std::string(CheckRange("n", value, range).message());
}

TEST(RangeTest, BothEndsAreAllowed) {
  for (const IntegerRange range : {IntegerRange{-3, 5}, kCounts, IntegerRange{}}) {
    EXPECT_TRUE(CheckRange("n", range.least, range).ok());
    EXPECT_TRUE(CheckRange("n", range.most, range).ok());
  }
}

TEST(RangeTest, AnErrorHasTheNameTheValueAndTheRange) {
  EXPECT_EQ(CheckRange("n", 0, {1, 2}).code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(Message(0, {1, 1024}), "n is 0; it must be in [1, 1024]");
  EXPECT_EQ(Message(1025, {1, 1024}), "n is 1025; it must be in [1, 1024]");
  EXPECT_EQ(Message(kLargest, {0, int64_t{1} << 40}),
            "n is 9223372036854775807; it must be in [0, 2^40]");
  EXPECT_EQ(Message(kSmallest, kCounts), "n is -9223372036854775808; it must be in [0, 2^62)");
  EXPECT_EQ(Message(int64_t{1} << 62, kCounts),
            "n is 4611686018427387904; it must be in [0, 2^62)");
  EXPECT_EQ(Message(0, {1, kLargest}), "n is 0; it must be at least 1");
  EXPECT_EQ(CheckRange("n", ~uint64_t{0}, {1, kLargest}).message(),
            "n is 18446744073709551615; it must be in [1, 2^63)");
  EXPECT_EQ(Message(0, {1, 5'000'000'000}), "n is 0; it must be in [1, 5000000000]");
}

}  // namespace
}  // namespace rapt
