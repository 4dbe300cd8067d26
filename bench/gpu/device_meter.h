// Measurements of a device for the GPU benchmark that the server does not need.
#ifndef RAPT_BENCH_GPU_DEVICE_METER_H_
#define RAPT_BENCH_GPU_DEVICE_METER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "attention/cudnn/device.h"

namespace rapt::bench {

// Measures on a separate CUDA stream. REQUIRES: one caller at a time, and no running lane.
class DeviceMeter {
 public:
  enum class Direction { kToDevice, kToHost };

  virtual ~DeviceMeter() = default;

  // The device as cuDNN describes it, JSON on one line.
  virtual std::string properties() const = 0;

  // Mean duration of a copy between the device and pinned or pageable host memory.
  virtual absl::StatusOr<double> CopySeconds(Direction direction, bool pinned, int64_t bytes) = 0;

  // Mean duration of the graph's kernels over random tensors in the device's memory.
  // REQUIRES: the graph has no lengths and no bias.
  virtual absl::StatusOr<double> KernelSeconds(const cudnn::SdpaGraph& graph,
                                               const cudnn::CompiledPlan& plan) = 0;
};

struct MeteredDevice {
  std::unique_ptr<cudnn::Device> device;
  std::unique_ptr<DeviceMeter> meter;
};

// Like cudnn::OpenCudaDevice(). Tests link their own implementation.
absl::StatusOr<MeteredDevice> OpenMeteredDevice(const std::string& libraries, int64_t memory_bytes);

}  // namespace rapt::bench

#endif  // RAPT_BENCH_GPU_DEVICE_METER_H_
