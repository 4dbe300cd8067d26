// Memory of the GPU that other processes share with this one.
#ifndef RAPT_ATTENTION_CUDNN_CUDA_SHARED_MEMORY_H_
#define RAPT_ATTENTION_CUDNN_CUDA_SHARED_MEMORY_H_

#include <cstdint>
#include <memory>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/cudnn/cuda_runtime.h"
#include "base/device_memory.h"

namespace rapt::cudnn {

// Thread-safe. What is opened may outlive it, but not the runtime's library.
class CudaSharedMemory {
 public:
  explicit CudaSharedMemory(const CudaRuntime& runtime);

  // As Device::OpenShared().
  absl::StatusOr<std::shared_ptr<const DeviceMemory>> Open(absl::string_view raw_handle,
                                                           int64_t device_id, int64_t byte_size);

  // Before the device is reset, which takes all of it away: from here on what is open is
  // Unavailable. Waits for copies on their way.
  void Invalidate();

 private:
  struct State;

  const std::shared_ptr<State> state_;
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_CUDA_SHARED_MEMORY_H_
