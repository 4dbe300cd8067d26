// Memory that the host reaches by copies only.
#ifndef RAPT_BASE_DEVICE_MEMORY_H_
#define RAPT_BASE_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace rapt {

// Thread-safe. Both copies block until they are done; what they touch lies within size().
// Unavailable where the device fails, or the memory is no longer there.
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  virtual int64_t size() const = 0;
  virtual absl::Status Read(int64_t offset, absl::Span<std::byte> target) const = 0;
  virtual absl::Status Write(int64_t offset, absl::Span<const std::byte> source) const = 0;
};

// Where a tensor begins in it. Without memory: it is none of a device.
struct DevicePart {
  const DeviceMemory* memory = nullptr;
  int64_t offset = 0;
};

}  // namespace rapt

#endif  // RAPT_BASE_DEVICE_MEMORY_H_
