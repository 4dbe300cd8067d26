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
  std::string libraries;     // directories, see Library::Load(); empty: where the system looks
  int lanes = 4;             // one copies in, one computes, one copies out, one is packed
  int64_t memory_bytes = 0;  // of the device, for all lanes; as much of the host's is pinned
};

// FailedPrecondition with the reason where there is no GPU to use, or no cuDNN in this build. What
// may end the process is tried in a child before, so the process has no other thread yet; Cancelled
// as TryInChild() says.
absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const CudaOptions& options);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_CUDA_DEVICE_H_
