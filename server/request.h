// What passes between the protocols and the engine. Knows neither of them.
#ifndef RAPT_SERVER_REQUEST_H_
#define RAPT_SERVER_REQUEST_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "attention/backend.h"
#include "attention/operator.h"
#include "base/clock.h"
#include "base/device_memory.h"
#include "base/sliced_bytes.h"

namespace rapt {

// Where a call's time goes, and where it may end.
enum class Stage : uint8_t {
  kReceive,  // its message comes
  kQueue,    // it waits, for memory or for a thread
  kCompute,
  kSend,  // its answer leaves
};
inline constexpr int kStages = 4;

// Where a tensor's row-major bytes lie, as the caller laid them out: in one piece of any alignment,
// in slices, or on a device.
struct InputBytes {
  InputBytes() = default;
  InputBytes(const std::byte* data, int64_t size) : size(size), data(data) {}
  InputBytes(SlicedBytes slices, int64_t size) : size(size), slices(slices) {}
  InputBytes(DevicePart device, int64_t size) : size(size), device(device) {}

  int64_t size = 0;
  const std::byte* data = nullptr;  // null: in slices or on the device
  SlicedBytes slices;
  DevicePart device;
  // In memory that the caller may write at any time: what decides something is copied first.
  bool is_lent = false;

  // Copies bytes [begin, begin + count), which are on the host.
  void Copy(int64_t begin, int64_t count, std::byte* target) const {
    if (in_slices()) return slices.Copy(begin, count, target);
    if (count > 0) std::memcpy(target, data + begin, static_cast<size_t>(count));
  }

  // The same from wherever they are. OK unless a device fails.
  absl::Status Fetch(int64_t begin, int64_t count, std::byte* target) const {
    if (on_device()) {
      return device.memory->Read(device.offset + begin, {target, static_cast<size_t>(count)});
    }
    Copy(begin, count, target);
    return absl::OkStatus();
  }

  bool in_slices() const { return data == nullptr && !slices.slices.empty(); }
  bool on_device() const { return device.memory != nullptr; }
  bool present() const { return data != nullptr || in_slices() || on_device(); }
};

// The tensors, each of the size that the call states. Absent where the call has none.
struct Inputs {
  InputBytes query, key, value, mask, past_key, past_value;
  std::vector<int64_t> key_lengths;  // nonpad_kv_seqlen, copied: it has to be aligned
};

// Memory of the caller's that an output is written to: of its size and aligned to its elements, or
// on a device. Neither: it goes into a buffer of ours.
struct OutputPlace {
  absl::Span<std::byte> bytes;
  DevicePart device;
};

struct OutputPlaces {
  OutputPlace y, lse, scores, present_key, present_value;
};

// One attention call, checked as far as its shapes go.
struct Request {
  ResolvedCall call;
  Inputs inputs;
  // Writes the mask, as the call states it, where it came in a form that nobody can read as it is:
  // inputs.mask then has no bytes but their number. Called once there is memory for it, on any
  // thread. Null: inputs.mask says it all.
  absl::AnyInvocable<absl::Status(absl::Span<std::byte> mask)> write_mask;
  OutputPlaces places;
  // Keeps the inputs' bytes and the outputs' places alive until done has run. Null where the caller
  // sees to that itself.
  std::shared_ptr<const void> owner;
  // Whether memory that the caller lends is still all there; where it is not, that is the request's
  // status. Called from several threads at once. Null: it lends none.
  absl::AnyInvocable<absl::Status() const> check_lent_memory;

  Instant deadline = Instant::max();
  // Set by the caller at any time to give the request up; outlives done. Null: never.
  const std::atomic<bool>* cancelled = nullptr;
  // 0: the default; 1 is the most urgent.
  uint64_t priority = 0;
};

// An output's bytes, row-major, aligned to a cache line unless they are in a place of the caller's.
// Copies share them; the memory and its place in the budget are given back with the last one.
struct OutputBuffer {
  absl::Span<const std::byte> bytes;
  std::shared_ptr<const void> owner;
};

struct Result {
  absl::Status status;

  // Empty unless the status is OK and the call wants them; Y is always there.
  OutputBuffer y, lse, scores, present_key, present_value;

  Stage ended_in = Stage::kQueue;            // or kCompute
  Routing routing;                           // its backend is null without a plan
  std::string plan;                          // Plan::Describe()
  double flops = 0;                          // Plan::flops
  std::chrono::nanoseconds queue_time{0};    // until the first task: for memory, then for a thread
  std::chrono::nanoseconds compute_time{0};  // from the first task to the last
  int64_t together = 0;  // requests that one run computed, this one among them; or 0
};

// Runs exactly once for each request, on any thread.
using Done = absl::AnyInvocable<void(Result)>;

}  // namespace rapt

#endif  // RAPT_SERVER_REQUEST_H_
