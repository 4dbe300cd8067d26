#include "tests/support/controlled_device.h"

#include "attention/cudnn/cuda_device.h"

namespace rapt {

test::FakeDevice::Controls& test::DeviceControls() {
  static auto& controls = *new FakeDevice::Controls;
  return controls;
}

absl::StatusOr<std::unique_ptr<cudnn::Device>> cudnn::OpenCudaDevice(const CudaOptions& options) {
  return std::make_unique<test::FakeDevice>(test::DeviceControls(), /*lanes=*/1,
                                            options.memory_bytes, options.page_memory_bytes);
}

}  // namespace rapt
