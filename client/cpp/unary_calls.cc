#include "client/cpp/unary_calls.h"

#include <algorithm>

#include "client/cpp/reason.h"
#include "client/cpp/retry.h"

namespace rapt::client {

absl::Status StopRequested() { return absl::CancelledError("a stop was requested"); }

bool WaitBeforeRetry(std::chrono::nanoseconds delay, grpc::Channel& channel,
                     const std::stop_token& stop) {
  constexpr std::chrono::milliseconds kStopPollInterval{20};
  const Deadline end = Deadline::After(delay);
  while (!stop.stop_requested() && end.left() > std::chrono::nanoseconds::zero()) {
    const auto turn = std::min<std::chrono::nanoseconds>(end.left(), kStopPollInterval);
    channel.WaitForStateChange(channel.GetState(/*try_to_connect=*/true),
                               Deadline::After(turn).ToGrpc());
  }
  return !stop.stop_requested();
}

UnaryCalls::UnaryCalls(const std::string& address, const Options& options,
                       const std::shared_ptr<grpc::ChannelCredentials>& credentials)
    : options_(options),
      connections_(address, options, credentials),
      random_(std::random_device()()) {}

std::optional<std::chrono::nanoseconds> UnaryCalls::DelayBeforeRetry(const RetryPolicy& policy,
                                                                     const absl::Status& status,
                                                                     int attempts,
                                                                     const Deadline& deadline) {
  const double random = [this] {
    MutexLock lock(mutex_);
    return std::uniform_real_distribution<double>()(random_);
  }();
  return client::DelayBeforeRetry(policy, status.code(), attempts, deadline.left(), random);
}

absl::Status UnaryCalls::StatusOf(const grpc::Status& status, const grpc::ClientContext& context,
                                  bool was_stopped) const {
  absl::Status converted = connections_.FromGrpc(status, was_stopped);
  if (!converted.ok()) SetReason(context, converted);
  return converted;
}

}  // namespace rapt::client
