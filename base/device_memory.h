// Memory that the host can access only by copying. Implemented by attention/cudnn and used by
// server/shared_memory, which does not depend on attention/.
#ifndef RAPT_BASE_DEVICE_MEMORY_H_
#define RAPT_BASE_DEVICE_MEMORY_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/types/span.h"

namespace rapt {

// Thread-safe. Read and Write block until the copy is done and return Unavailable if the device
// fails or the memory has been freed. REQUIRES: the range lies within size().
class DeviceMemory {
 public:
  virtual ~DeviceMemory() = default;

  virtual int64_t size() const = 0;
  virtual absl::Status Read(int64_t offset, absl::Span<std::byte> target) const = 0;
  virtual absl::Status Write(int64_t offset, absl::Span<const std::byte> source) const = 0;
};

// The location of a tensor in device memory. If `memory` is null, the tensor is not on a device.
struct DevicePart {
  const DeviceMemory* memory = nullptr;
  int64_t offset = 0;
};

}  // namespace rapt

#endif  // RAPT_BASE_DEVICE_MEMORY_H_
