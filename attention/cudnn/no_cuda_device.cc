// Replaces cuda_device.cc in builds without cuDNN.
#include "absl/status/status.h"
#include "attention/cudnn/cuda_device.h"

namespace rapt::cudnn {

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const CudaOptions&) {
  return absl::FailedPreconditionError("this build does not include cuDNN");
}

}  // namespace rapt::cudnn
