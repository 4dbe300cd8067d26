// The first GPU of this machine as a Device.
#ifndef RAPT_ATTENTION_CUDNN_CUDA_DEVICE_H_
#define RAPT_ATTENTION_CUDNN_CUDA_DEVICE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "attention/cudnn/device.h"

namespace rapt::cudnn {

struct CudaOptions {
  std::string libraries;     // directories, see Library::Load(); empty: the system's search path
  int lanes = 4;             // one copies in, one computes, one copies out, one is packed
  int64_t memory_bytes = 0;  // of the device, for all lanes; as much host memory is pinned
  int64_t page_memory_bytes = 0;  // of the device, for copies of pages, in addition
};

// Returns FailedPrecondition with the reason if there is no usable GPU or no cuDNN in this build;
// Cancelled as TryInChild() does. Operations that may crash are tried in a child process first.
// REQUIRES: the process has no other thread yet.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const CudaOptions& options);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_CUDA_DEVICE_H_
