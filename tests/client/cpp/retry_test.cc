#include "client/cpp/retry.h"

#include <gtest/gtest.h>

#include <chrono>
#include <limits>
#include <optional>

namespace rapt::client {
namespace {

using std::chrono::hours;
using std::chrono::milliseconds;
using std::chrono::nanoseconds;

constexpr RetryPolicy kPolicy{
    .max_attempts = 5, .initial_backoff = milliseconds(100), .max_backoff = milliseconds(300)};
constexpr double kAlmostOne = 1 - std::numeric_limits<double>::epsilon();

std::optional<nanoseconds> Delay(absl::StatusCode code, int attempts, nanoseconds time_left,
                                 double random, RetryPolicy policy = kPolicy) {
  return DelayBeforeRetry(policy, code, attempts, time_left, random);
}

TEST(RetryTest, RetriesOnlyUnavailable) {
  for (int code = 0; code <= 16; ++code) {
    const auto status_code = static_cast<absl::StatusCode>(code);
    EXPECT_EQ(Delay(status_code, 1, hours(1), 0).has_value(),
              status_code == absl::StatusCode::kUnavailable)
        << absl::StatusCodeToString(status_code);
  }
}

TEST(RetryTest, RetriesResourceExhaustedOnRequest) {
  RetryPolicy policy = kPolicy;
  policy.retries_resource_exhausted = true;
  EXPECT_TRUE(Delay(absl::StatusCode::kResourceExhausted, 1, hours(1), 0, policy).has_value());
  EXPECT_FALSE(Delay(absl::StatusCode::kInvalidArgument, 1, hours(1), 0, policy).has_value());
}

TEST(RetryTest, StopsAfterTheLastAttempt) {
  EXPECT_TRUE(Delay(absl::StatusCode::kUnavailable, 4, hours(1), 0).has_value());
  EXPECT_FALSE(Delay(absl::StatusCode::kUnavailable, 5, hours(1), 0).has_value());
}

TEST(RetryTest, DoublesTheBackoffUpToItsLimit) {
  const milliseconds backoffs[] = {milliseconds(100), milliseconds(200), milliseconds(300),
                                   milliseconds(300)};
  for (int attempts = 1; attempts <= 4; ++attempts) {
    const nanoseconds backoff = backoffs[attempts - 1];
    EXPECT_EQ(Delay(absl::StatusCode::kUnavailable, attempts, hours(1), 0), backoff / 2);
    const auto longest = Delay(absl::StatusCode::kUnavailable, attempts, hours(1), kAlmostOne);
    EXPECT_LE(longest, backoff) << attempts;
    EXPECT_GT(longest, backoff * 99 / 100) << attempts;
  }
}

TEST(RetryTest, DoesNotOverflow) {
  const RetryPolicy policy{.max_attempts = std::numeric_limits<int>::max(),
                           .initial_backoff = nanoseconds(1),
                           .max_backoff = nanoseconds::max()};
  const auto delay =
      Delay(absl::StatusCode::kUnavailable, 1'000'000, nanoseconds::max(), 0, policy);
  EXPECT_EQ(delay, nanoseconds::max() / 2 + nanoseconds(1));
}

TEST(RetryTest, DoesNotWaitPastTheDeadline) {
  EXPECT_TRUE(Delay(absl::StatusCode::kUnavailable, 1, milliseconds(51), 0).has_value());
  EXPECT_FALSE(Delay(absl::StatusCode::kUnavailable, 1, milliseconds(50), 0).has_value());
  EXPECT_FALSE(Delay(absl::StatusCode::kUnavailable, 1, milliseconds(-1), 0).has_value());
}

TEST(RetryTest, RejectsInvalidPolicies) {
  EXPECT_TRUE(Validate(RetryPolicy{}).ok());
  EXPECT_EQ(Validate(RetryPolicy{.max_attempts = 0}).message(),
            "retries.max_attempts is 0; it must be at least 1");
  EXPECT_FALSE(Validate(RetryPolicy{.initial_backoff = nanoseconds(-1)}).ok());
  EXPECT_FALSE(Validate(RetryPolicy{.initial_backoff = hours(1)}).ok());
}

}  // namespace
}  // namespace rapt::client
