// Starts the cuDNN backend of the process on a fake device, so that the tests of all targets run on
// it, too.
#include "attention/cpu/cpu_backend.h"
#include "attention/cudnn/cudnn_backend.h"
#include "tests/support/fake_device.h"

namespace rapt::test {
namespace {

const bool started = [] {
  static FakeDevice::Controls controls;
  static const SteadyClock clock;
  // So little memory that requests are split into pieces, yet small ones can be batched.
  cudnn::ProcessBackend().Start(std::make_unique<FakeDevice>(controls, /*lanes=*/2, 128 << 10),
                                CpuBackend(), clock, {});
  return true;
}();

}  // namespace
}  // namespace rapt::test
