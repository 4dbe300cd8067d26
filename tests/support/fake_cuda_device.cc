// In the place of the GPU of this machine: rapt-server linked with it computes on a FakeDevice.
#include "server/attention/cudnn/cuda_device.h"
#include "tests/support/fake_device.h"

namespace rapt::cudnn {

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const CudaOptions& options) {
  static test::FakeDevice::Controls controls;
  return std::make_unique<test::FakeDevice>(controls, options.lanes,
                                            options.memory_bytes / options.lanes);
}

}  // namespace rapt::cudnn
