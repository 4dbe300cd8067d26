// What the GPU benchmark asks of a device beside what the server does with it.
#ifndef RAPT_BENCH_GPU_DEVICE_METER_H_
#define RAPT_BENCH_GPU_DEVICE_METER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "attention/cudnn/device.h"

namespace rapt::bench {

// Measures on a stream of its own. One caller at a time, while no lane runs.
class DeviceMeter {
 public:
  enum class Direction { kToDevice, kToHost };

  virtual ~DeviceMeter() = default;

  // The device as cuDNN describes it, JSON on one line.
  virtual std::string properties() const = 0;

  // One copy between the device and memory of the host that is pinned or not; the mean of many.
  virtual absl::StatusOr<double> CopySeconds(Direction direction, bool pinned, int64_t bytes) = 0;

  // The graph's kernels alone, their tensors in the device's memory and full of random numbers; the
  // mean of many runs. The graph has neither lengths nor a bias.
  virtual absl::StatusOr<double> KernelSeconds(const cudnn::SdpaGraph& graph,
                                               const cudnn::CompiledPlan& plan) = 0;
};

struct MeteredDevice {
  std::unique_ptr<cudnn::Device> device;
  std::unique_ptr<DeviceMeter> meter;
};

// As cudnn::OpenCudaDevice(). Tests link one of their own.
absl::StatusOr<MeteredDevice> OpenMeteredDevice(const std::string& libraries, int64_t memory_bytes);

}  // namespace rapt::bench

#endif  // RAPT_BENCH_GPU_DEVICE_METER_H_
