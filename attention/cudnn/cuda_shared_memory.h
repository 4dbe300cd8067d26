// GPU memory shared by other processes through CUDA IPC.
#ifndef RAPT_ATTENTION_CUDNN_CUDA_SHARED_MEMORY_H_
#define RAPT_ATTENTION_CUDNN_CUDA_SHARED_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/cudnn/cuda_runtime.h"
#include "base/device_memory.h"

namespace rapt::cudnn {

// Thread-safe. Opened memory may outlive this object, but not the runtime's library.
class CudaSharedMemory {
 public:
  explicit CudaSharedMemory(const CudaRuntime& runtime);

  // Implements Device::OpenShared().
  absl::StatusOr<std::shared_ptr<const DeviceMemory>> Open(absl::string_view raw_handle,
                                                           int64_t device_id, int64_t byte_size);

  // Call before a device reset, which frees all of it: from here on, opened memory returns
  // Unavailable. Waits for copies in flight.
  void Invalidate();

 private:
  struct State;

  const std::shared_ptr<State> state_;
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_CUDA_SHARED_MEMORY_H_
