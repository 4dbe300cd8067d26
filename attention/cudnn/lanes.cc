#include "attention/cudnn/lanes.h"

#include <algorithm>

#include "base/log.h"

namespace rapt::cudnn {
namespace {

// The kernels' workspace is 1/8 of a lane's memory.
constexpr int64_t kWorkspaceFraction = 8;

}  // namespace

absl::string_view NameOf(FallbackReason reason) {
  constexpr absl::string_view kNames[kFallbackReasons] = {"device", "numbers", "kernels", "memory"};
  return kNames[static_cast<size_t>(reason)];
}

bool DeviceHealth::usable() const {
  MutexLock lock(mutex_);
  return !failed_ || (!restarting_ && clock_.Now() >= retry_at_);
}

int DeviceHealth::running() const {
  MutexLock lock(mutex_);
  return running_;
}

bool DeviceHealth::Enter() {
  MutexLock lock(mutex_);
  while (failed_) {
    if (clock_.Now() < retry_at_) return false;
    if (running_ > 0 || restarting_) {
      changed_.Wait(mutex_);
    } else {
      RestartDevice();
    }
  }
  ++running_;
  return true;
}

void DeviceHealth::Leave(const std::optional<absl::Status>& run) {
  MutexLock lock(mutex_);
  --running_;
  if (run && run->ok()) {
    if (!failed_) backoff_ = std::chrono::nanoseconds(0);
  } else if (run && !failed_) {
    failed_ = true;
    BackOff();
    Log(LogLevel::kWarning, "device failed",
        {{"error", run->message()}, {"backoff_ms", Milliseconds(backoff_)}});
  }
  changed_.SignalAll();
}

void DeviceHealth::RestartDevice() {
  restarting_ = true;
  mutex_.Unlock();  // Restart() is slow, and planning reads the health
  const absl::Status status = device_.Restart();
  on_restart_();
  mutex_.Lock();
  restarting_ = false;
  failed_ = !status.ok();
  if (failed_) BackOff();
  Log(failed_ ? LogLevel::kWarning : LogLevel::kInfo, "device restarted",
      {{"error", status.message()}});
  changed_.SignalAll();
}

void DeviceHealth::BackOff() {
  backoff_ = std::clamp<std::chrono::nanoseconds>(2 * backoff_, kFirstBackoff, kMaxBackoff);
  retry_at_ = clock_.Now() + backoff_;
}

int64_t Lanes::tensor_bytes() const {
  return device_.arena_bytes() - device_.arena_bytes() / kWorkspaceFraction;
}

bool Lanes::Use(int worker, int64_t bytes,
                absl::FunctionRef<std::optional<absl::Status>(Lane&)> use) {
  // Measurements share the lanes with requests planned before they began.
  MutexLock lock(mutexes_[worker]);
  if (!health_.Enter()) return false;
  used_bytes_ += bytes;
  const std::optional<absl::Status> run = use(device_.lane(worker));
  used_bytes_ -= bytes;
  health_.Leave(run);
  return true;
}

}  // namespace rapt::cudnn
