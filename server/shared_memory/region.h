// Memory that a caller shares with the server.
#ifndef RAPT_SERVER_SHARED_MEMORY_REGION_H_
#define RAPT_SERVER_SHARED_MEMORY_REGION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/device_memory.h"

namespace rapt {

// The memory stays mapped for the region's lifetime. Its owner may read and write the bytes at any
// time, concurrently with the server: copy data before validating it. Thread-safe.
class Region {
 public:
  virtual ~Region() = default;

  // Empty for memory of a device.
  virtual absl::Span<std::byte> bytes() const = 0;

  // Null for memory of the host.
  virtual const DeviceMemory* device() const { return nullptr; }

  // Returns false once truncated memory was accessed. It then reads as zeros.
  virtual bool intact() const = 0;
};

// Opens device memory by its cudaIpcMemHandle_t. Provided by a backend that uses the device.
using OpenCudaMemory = std::function<absl::StatusOr<std::shared_ptr<const DeviceMemory>>(
    absl::string_view raw_handle, int64_t device_id, int64_t byte_size)>;

// Maps bytes [offset, offset + byte_size) of the POSIX shared memory object `key` for reading and
// writing. Returns NotFound if the server cannot open it; InvalidArgument if it is shorter;
// ResourceExhausted if there are too many regions or mmap() fails. No error message contains the
// key.
absl::StatusOr<std::shared_ptr<const Region>> OpenSystemRegion(const std::string& key,
                                                               int64_t offset, int64_t byte_size);

}  // namespace rapt

#endif  // RAPT_SERVER_SHARED_MEMORY_REGION_H_
