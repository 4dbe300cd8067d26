// Estimates the time of a problem on the device and on the CPU of this machine from a few measured
// rates.
#ifndef RAPT_ATTENTION_CUDNN_COST_MODEL_H_
#define RAPT_ATTENTION_CUDNN_COST_MODEL_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "base/clock.h"
#include "base/thread_pool.h"

namespace rapt::cudnn {

// The work of a problem.
struct Work {
  DType dtype = DType::kFloat32;
  double flops = 0;    // as Plan counts them
  double bytes = 0;    // of tensors, counted each time they are moved
  int64_t pieces = 1;  // sent to the device
  int64_t lanes = 1;   // that run pieces concurrently
};

// Returns the bytes of Q, K, V, mask and O, and in a backward pass of dO, dQ, dK and dV.
double MovedBytes(const Problem& problem);

struct CostModel {
  static constexpr size_t kTypes = 3;  // the first values of DType, which cuDNN supports
  using PerType = std::array<double, kTypes>;

  // Each piece is packed, copied in, computed, copied out and unpacked.
  struct Device {
    double run_seconds = 0;            // fixed cost of a piece
    double lane_bytes_per_second = 0;  // through one lane
    double bytes_per_second = 0;       // through all lanes at once
    PerType flops_per_second{};

    double Seconds(const Work& work) const;
  };
  // All threads. Memory access overlaps with computation on other threads.
  struct Cpu {
    double bytes_per_second = 0;
    PerType flops_per_second{};

    double Seconds(const Work& work) const;
  };

  Device device;
  Cpu cpu;
};

// The problems used to measure a device.
struct DeviceSamples {
  // One head with `length` queries and keys. REQUIRES: a lane holds it as FP32.
  DeviceSamples(int64_t length, int lanes);

  Problem tiny;
  Problem windowed;               // the tensors of `full` with hardly any operations
  Problem windowed_in_all_lanes;  // one `windowed` per lane
  Problem full;                   // in BF16; FP16 is as fast
  Problem full_fp32;

  std::vector<Problem> all() const {
    return {tiny, windowed, windowed_in_all_lanes, full, full_fp32};
  }
};

// Returns the seconds that a problem takes on an otherwise idle machine.
using Stopwatch = absl::FunctionRef<absl::StatusOr<double>(const Problem&)>;
// Returns the work of a problem on the measured device or CPU.
using Workload = absl::FunctionRef<Work(const Problem&)>;

// Return the stopwatch's errors.
absl::StatusOr<CostModel::Device> MeasureDevice(const DeviceSamples& samples, Stopwatch seconds_of,
                                                Workload work_of);
absl::StatusOr<CostModel::Cpu> MeasureCpu(int threads, Stopwatch seconds_of, Workload work_of);

// Returns the best time in seconds of a few runs of a plan on sample tensors. Returns Cancelled
// once `go_on`, called before each run, returns false; Unavailable if a fallback computed part of
// it.
absl::StatusOr<double> SecondsOf(const Plan& plan, ThreadPool& pool, const Clock& clock,
                                 absl::FunctionRef<bool()> go_on);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_COST_MODEL_H_
