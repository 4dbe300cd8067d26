// In the place of the GPU of this machine: rapt-server linked with it computes on a FakeDevice.
// With
// --cudnn_libraries=stuck the trial in a child never ends; that one's process id is on stderr. With
// --cudnn_libraries=idle it computes nothing, in no time.
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
  return std::make_unique<test::FakeDevice>(controls, options.lanes,
                                            options.memory_bytes / options.lanes);
}

}  // namespace rapt::cudnn
