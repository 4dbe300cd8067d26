// Whether and when a failed attempt is retried.
#ifndef RAPT_CLIENT_CPP_RETRY_H_
#define RAPT_CLIENT_CPP_RETRY_H_

#include <chrono>
#include <optional>

#include "absl/status/status.h"
#include "rapt/client.h"

namespace rapt::client {

// InvalidArgument names the field.
absl::Status Validate(const RetryPolicy& policy);

// Returns the delay before the next attempt, or nullopt if the error is final. `attempts` were
// made, and the last one failed with `code`. `random` is in [0, 1).
std::optional<std::chrono::nanoseconds> DelayBeforeRetry(const RetryPolicy& policy,
                                                         absl::StatusCode code, int attempts,
                                                         std::chrono::nanoseconds time_left,
                                                         double random);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_RETRY_H_
