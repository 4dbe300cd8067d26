// In the place of the GPU of this machine: a FakeDevice with one lane that the test controls. For
// binaries that link rapt_server without rapt_cuda_device.
#ifndef RAPT_TESTS_SUPPORT_CONTROLLED_DEVICE_H_
#define RAPT_TESTS_SUPPORT_CONTROLLED_DEVICE_H_

#include "tests/support/fake_device.h"

namespace rapt::test {

// Of all devices that the server opens. Set it while no server runs.
FakeDevice::Controls& DeviceControls();

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_CONTROLLED_DEVICE_H_
