#include "rapt/client.h"

#include <grpcpp/alarm.h>
#include <grpcpp/grpcpp.h>

#include <condition_variable>
#include <limits>
#include <mutex>
#include <random>
#include <utility>

#include "absl/strings/str_cat.h"
#include "client/rapt/codec.h"
#include "client/rapt/connections.h"
#include "client/rapt/deadline.h"
#include "client/rapt/retry.h"
#include "server/base/mutex.h"

namespace rapt::client {
namespace {

absl::Status Validate(const std::string& address, const Options& options) {
  if (address.empty()) return absl::InvalidArgumentError("the server's address is empty");
  if (options.connect_timeout.count() < 0) {
    return absl::InvalidArgumentError("connect_timeout is negative");
  }
  if (options.max_message_bytes < 1 ||
      options.max_message_bytes > std::numeric_limits<int32_t>::max()) {
    return absl::InvalidArgumentError(absl::StrCat("max_message_bytes is ",
                                                   options.max_message_bytes,
                                                   "; it must be 1 to 2147483647"));
  }
  if (options.connections < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("connections is ", options.connections, "; it must be at least 1"));
  }
  return Validate(options.retries);
}

absl::Status Stopped() { return absl::CancelledError("a stop was requested"); }

// False when a stop was requested first.
bool SleepFor(std::chrono::nanoseconds duration, const std::stop_token& stop) {
  std::mutex mutex;
  std::condition_variable_any never;
  std::unique_lock<std::mutex> lock(mutex);
  never.wait_for(lock, stop, duration, [] { return false; });
  return !stop.stop_requested();
}

}  // namespace

// What all calls of a client share. Thread-safe.
class Client::Core {
 public:
  Core(const std::string& address, const Options& options)
      : options_(options), connections_(address, options), random_(std::random_device()()) {}

  const Options& options() const { return options_; }
  Connections& connections() { return connections_; }

  Deadline DeadlineOf(const CallOptions& options) const {
    return Deadline::After(options.timeout.value_or(options_.default_timeout));
  }

  std::optional<std::chrono::nanoseconds> DelayBeforeRetry(const RetryPolicy& policy,
                                                           const absl::Status& status, int attempts,
                                                           const Deadline& deadline) {
    const double random = [this] {
      MutexLock lock(mutex_);
      return std::uniform_real_distribution<double>()(random_);
    }();
    return client::DelayBeforeRetry(policy, status.code(), attempts, deadline.left(), random);
  }

  // Attempts until one succeeds or its error stands. `method` is a blocking method of a stub:
  // grpc::Status(const Connection&, grpc::ClientContext*, Response*).
  template <typename Response, typename Method>
  absl::StatusOr<Response> Call(const CallOptions& options, const RetryPolicy& policy,
                                const Method& method);

  void EnterAsync() {
    MutexLock lock(mutex_);
    ++async_calls_;
  }

  // The last thing that an asynchronous call does with the client.
  void LeaveAsync() {
    MutexLock lock(mutex_);
    if (--async_calls_ == 0) no_async_calls_.SignalAll();
  }

  // Requested when the client is being destroyed.
  std::stop_token stop_of_client() const { return stop_.get_token(); }

  void StopAsyncCalls() {
    stop_.request_stop();
    MutexLock lock(mutex_);
    while (async_calls_ > 0) no_async_calls_.Wait(mutex_);
  }

 private:
  const Options options_;
  Connections connections_;
  std::stop_source stop_;

  Mutex mutex_;
  CondVar no_async_calls_;
  int async_calls_ ABSL_GUARDED_BY(mutex_) = 0;
  std::minstd_rand random_ ABSL_GUARDED_BY(mutex_);
};

template <typename Response, typename Method>
absl::StatusOr<Response> Client::Core::Call(const CallOptions& options, const RetryPolicy& policy,
                                            const Method& method) {
  const Deadline deadline = DeadlineOf(options);
  for (int attempts = 1;; ++attempts) {
    Response response;
    grpc::ClientContext context;
    context.set_deadline(deadline.ToGrpc());
    absl::Status status;
    {
      const std::stop_callback stop(options.stop, [&context] { context.TryCancel(); });
      const ConnectionLease connection = connections_.LeastBusy();
      status = connections_.FromGrpc(method(*connection, &context, &response));
    }
    if (status.ok()) return response;
    const auto delay = DelayBeforeRetry(policy, status, attempts, deadline);
    if (!delay) return status;
    if (!SleepFor(*delay, options.stop)) return Stopped();
  }
}

namespace {

// One AttendAsync: attempts until one is final, then the callback, then it deletes itself. Its steps
// follow one another, each on a thread of gRPC's; only Stop() comes from anywhere at any time.
class AsyncAttend {
 public:
  AsyncAttend(Client::Core& core, const AttendCall& call, const CallOptions& options,
              Client::AttendCallback callback)
      : core_(core),
        deadline_(core.DeadlineOf(options)),
        callback_(std::move(callback)),
        request_(Encode(call, core.options().max_message_bytes)) {
    core_.EnterAsync();
  }
};

}  // namespace

}  // namespace rapt::client
