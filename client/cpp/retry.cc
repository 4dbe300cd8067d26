#include "client/cpp/retry.h"

#include <algorithm>

#include "base/invalid.h"

namespace rapt::client {
namespace {

bool IsRetried(const RetryPolicy& policy, absl::StatusCode code) {
  return code == absl::StatusCode::kUnavailable ||
         (code == absl::StatusCode::kResourceExhausted && policy.retries_resource_exhausted);
}

}  // namespace

absl::Status Validate(const RetryPolicy& policy) {
  if (policy.max_attempts < 1) {
    return Invalid("retries.max_attempts is ", policy.max_attempts, "; it must be at least 1");
  }
  if (policy.initial_backoff.count() < 0 || policy.max_backoff < policy.initial_backoff) {
    return Invalid("retries.initial_backoff is ", policy.initial_backoff.count(),
                   " ns and retries.max_backoff ", policy.max_backoff.count(),
                   " ns; the first must be at least 0, the second at least the first");
  }
  return absl::OkStatus();
}

std::optional<std::chrono::nanoseconds> DelayBeforeRetry(const RetryPolicy& policy,
                                                         absl::StatusCode code, int attempts,
                                                         std::chrono::nanoseconds time_left,
                                                         double random) {
  if (!IsRetried(policy, code) || attempts >= policy.max_attempts) return std::nullopt;
  std::chrono::nanoseconds backoff = policy.initial_backoff;
  for (int i = 1; i < attempts && backoff < policy.max_backoff; ++i) {
    backoff = backoff < policy.max_backoff / 2 ? backoff * 2 : policy.max_backoff;
  }
  const auto delay = std::chrono::nanoseconds(
      static_cast<int64_t>(static_cast<double>(backoff.count()) * (0.5 + 0.5 * random)));
  if (delay >= time_left) return std::nullopt;
  return delay;
}

}  // namespace rapt::client
