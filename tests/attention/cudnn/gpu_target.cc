// Starts the cuDNN backend of the process on the GPU of this machine, so that every test that runs
// on all targets runs there, too. Ends the process where there is none.
#include <cstdio>
#include <cstdlib>

#include "server/attention/cpu/cpu_backend.h"
#include "server/attention/cudnn/cuda_device.h"
#include "server/attention/cudnn/cudnn_backend.h"

namespace rapt::test {
namespace {

const bool started = [] {
  static const SteadyClock clock;
  const char* libraries = std::getenv("RAPT_CUDNN_LIBRARIES");
  cudnn::ProcessBackend().Start(
      cudnn::OpenCudaDevice(
          {.libraries = libraries == nullptr ? "" : libraries, .memory_bytes = int64_t{1} << 30}),
      CpuBackend(), clock, {});
  const absl::Status status = cudnn::ProcessBackend().Available();
  if (status.ok()) return true;
  std::fprintf(stderr, "%s\n", std::string(status.message()).c_str());
  std::exit(1);
}();

}  // namespace
}  // namespace rapt::test
