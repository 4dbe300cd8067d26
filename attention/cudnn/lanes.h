// The use of a device's lanes by several threads.
#ifndef RAPT_ATTENTION_CUDNN_LANES_H_
#define RAPT_ATTENTION_CUDNN_LANES_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "attention/cudnn/device.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace rapt::cudnn {

// Why the fallback computes a piece instead of the device.
enum class FallbackReason : uint8_t {
  kDevice,   // the device failed on this piece or earlier
  kNumbers,  // the device would deviate from the definition for these values, see StageInputs()
  kKernels,  // cuDNN has no kernels for it
  kMemory,   // the kernels need more workspace than the lane has, or their pages do not fit
};
inline constexpr size_t kFallbackReasons = 4;
absl::string_view NameOf(FallbackReason reason);

// The number of pieces that the fallback computed, by reason.
using FallbackPieces = std::array<std::atomic<int64_t>, kFallbackReasons>;

// A circuit breaker: after an error the device is not used until a backoff has passed, which
// doubles with each consecutive error. Thread-safe.
class DeviceHealth {
 public:
  static constexpr std::chrono::seconds kFirstBackoff{1};
  static constexpr std::chrono::seconds kMaxBackoff{60};

  // `on_restart` is called after each Device::Restart(), before a lane is used again.
  DeviceHealth(Device& device, const Clock& clock, std::function<void()> on_restart)
      : device_(device), clock_(clock), on_restart_(std::move(on_restart)) {}

  // Returns whether Enter() would succeed now.
  bool usable() const;

  // The number of lanes between Enter() and Leave().
  int running() const;

  // Call before using a lane. Returns false during the backoff. After it, the first caller restarts
  // the device and others wait for that.
  bool Enter();
  // Call after using a lane, with the status of its run; nullopt if there was no run.
  void Leave(const std::optional<absl::Status>& run);

 private:
  void RestartDevice() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void BackOff() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Device& device_;
  const Clock& clock_;
  const std::function<void()> on_restart_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  bool restarting_ ABSL_GUARDED_BY(mutex_) = false;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;  // lanes
  std::chrono::nanoseconds backoff_ ABSL_GUARDED_BY(mutex_){0};
  Instant retry_at_ ABSL_GUARDED_BY(mutex_);
};

// Thread-safe.
class Lanes {
 public:
  // REQUIRES: the device and the clock outlive this.
  Lanes(Device& device, const Clock& clock, std::function<void()> on_restart)
      : device_(device),
        health_(device, clock, std::move(on_restart)),
        mutexes_(std::make_unique<Mutex[]>(static_cast<size_t>(device.lanes()))) {}

  const Device& device() const { return device_; }
  const DeviceHealth& health() const { return health_; }
  // The memory of a lane for tensors; the rest is for the kernels' workspace.
  int64_t tensor_bytes() const;
  // The memory in use, of all lanes.
  int64_t used_bytes() const { return used_bytes_; }

  // Calls `use` with the worker's lane, of which it uses `bytes`. It returns the status of its run;
  // nullopt if there was none. Returns false, without a call, while the device is unavailable. The
  // device does not restart during the call.
  bool Use(int worker, int64_t bytes, absl::FunctionRef<std::optional<absl::Status>(Lane&)> use);

 private:
  Device& device_;
  DeviceHealth health_;
  const std::unique_ptr<Mutex[]> mutexes_;
  std::atomic<int64_t> used_bytes_{0};
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_LANES_H_
