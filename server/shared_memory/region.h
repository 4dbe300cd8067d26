// Memory that a caller shares with the server, whoever mapped it.
#ifndef RAPT_SERVER_SHARED_MEMORY_REGION_H_
#define RAPT_SERVER_SHARED_MEMORY_REGION_H_

#include <cstddef>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/device_memory.h"

namespace rapt {

// There as long as it lives. Its owner may read and write the bytes at any time, also while we
// do: what decides something is copied before it is looked at. Thread-safe.
class Region {
 public:
  virtual ~Region() = default;

  // Empty for memory of a device.
  virtual absl::Span<std::byte> bytes() const = 0;

  // Null for memory of the host.
  virtual const DeviceMemory* device() const { return nullptr; }

  // Whether all of it was there whenever it was touched. Once it was not, it never is again, and
  // reads as zeros.
  virtual bool intact() const = 0;
};

// Opens the memory of a device that a cudaIpcMemHandle_t stands for. A backend that computes there
// has one.
using OpenCudaMemory = std::function<absl::StatusOr<std::shared_ptr<const DeviceMemory>>(
    absl::string_view raw_handle, int64_t device_id, int64_t byte_size)>;

}  // namespace rapt

#endif  // RAPT_SERVER_SHARED_MEMORY_REGION_H_
