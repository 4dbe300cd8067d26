// Adds a fake device to TargetBackends(), so that every test that runs on all targets runs on it.
#include "attention/cpu/cpu_backend.h"
#include "attention/cudnn/cudnn_backend.h"
#include "tests/support/fake_device.h"
#include "tests/support/run_attention.h"

namespace rapt::test {

const BackendSet& TargetBackends() {
  static const BackendSet& backends = *[] {
    static FakeDevice::Controls controls;
    static const SteadyClock clock;
    auto* device = new cudnn::CudnnBackend;  // never destroyed, like the set
    // Small enough that requests are split, large enough that small ones are batched.
    device->Start(std::make_unique<FakeDevice>(controls, /*lanes=*/2, 128 << 10,
                                               /*page_memory_bytes=*/8 << 20),
                  CpuBackend(), clock, {});
    return new BackendSet({device});
  }();
  return backends;
}

}  // namespace rapt::test
