#include "server/calls/open_calls.h"

#include "absl/strings/str_cat.h"
#include "server/rejection.h"

namespace rapt {

absl::Status OpenCalls::Enter(const std::string& caller) {
  MutexLock lock(mutex_);
  if (const int64_t places = count_ + idle_; places >= limits_.calls) {
    return Reject(Rejection::kOpenCalls, absl::StatusCode::kResourceExhausted,
                  absl::StrCat("the server has ", places, " open calls; at most ", limits_.calls,
                               " are allowed"));
  }
  int64_t& calls = by_caller_[caller];
  if (calls >= limits_.calls_per_caller) {
    return Reject(Rejection::kCallerCalls, absl::StatusCode::kResourceExhausted,
                  absl::StrCat("this caller has ", calls, " open calls; at most ",
                               limits_.calls_per_caller, " are allowed"));
  }
  ++calls;
  ++count_;
  return absl::OkStatus();
}

void OpenCalls::Leave(const std::string& caller) {
  MutexLock lock(mutex_);
  ++served_;
  Forget(caller);
  Close();
}

void OpenCalls::LeaveIdle(const std::string& caller) {
  MutexLock lock(mutex_);
  --idle_;
  Forget(caller);
}

void OpenCalls::MarkIdle() {
  MutexLock lock(mutex_);
  ++idle_;
  Close();
}

void OpenCalls::MarkActive() {
  MutexLock lock(mutex_);
  --idle_;
  ++count_;
  ++served_;
}

void OpenCalls::Close() {
  if (--count_ == 0) all_closed_.SignalAll();
}

void OpenCalls::Forget(const std::string& caller) {
  const auto calls = by_caller_.find(caller);
  if (--calls->second == 0) by_caller_.erase(calls);
}

int64_t OpenCalls::served() const {
  MutexLock lock(mutex_);
  return served_;
}

void OpenCalls::ExportTo(MetricSink& sink) const {
  sink.AddGauge("rapt_open_calls", "Tensor calls in flight.", {}, [this] { return count(); });
}

int64_t OpenCalls::count() const {
  MutexLock lock(mutex_);
  return count_;
}

int64_t OpenCalls::places() const {
  MutexLock lock(mutex_);
  return count_ + idle_;
}

bool OpenCalls::WaitUntilNone(std::chrono::nanoseconds timeout) {
  const auto end = std::chrono::steady_clock::now() + timeout;
  MutexLock lock(mutex_);
  while (count_ > 0) {
    const std::chrono::nanoseconds left = end - std::chrono::steady_clock::now();
    if (left <= std::chrono::nanoseconds::zero()) return false;
    all_closed_.WaitFor(mutex_, left);
  }
  return true;
}

}  // namespace rapt
