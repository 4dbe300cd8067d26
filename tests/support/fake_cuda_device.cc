// Replaces the GPU of this machine: a rapt-server linked with this file computes on a FakeDevice.
// With --cudnn_libraries=stuck the trial never ends; the process id of its child is on stderr. With
// --cudnn_libraries=idle the device returns at once without computing.
#include <unistd.h>

#include <cstdio>

#include "attention/cudnn/cuda_device.h"
#include "attention/cudnn/probe.h"
#include "tests/support/fake_device.h"

namespace rapt::cudnn {
namespace {

absl::Status GetStuck() {
  std::fprintf(stderr, "trial in process %d\n", static_cast<int>(getpid()));
  for (;;) pause();
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const CudaOptions& options) {
  if (options.libraries == "stuck") return TryInChild(GetStuck, std::chrono::minutes(10));
  static test::FakeDevice::Controls controls;
  controls.computes = options.libraries != "idle";
  return std::make_unique<test::FakeDevice>(
      controls, options.lanes, options.memory_bytes / options.lanes, options.page_memory_bytes);
}

}  // namespace rapt::cudnn
