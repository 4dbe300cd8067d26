// What a problem takes on the device and on the CPU of this machine, by a handful of numbers that
// are measured there.
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

// What there is to do for a problem.
struct Work {
  DType dtype = DType::kFloat32;
  double flops = 0;    // as Plan counts them
  double bytes = 0;    // of tensors, as often as they are moved
  int64_t pieces = 1;  // that a device gets them in
  int64_t lanes = 1;   // that have a piece at once
};

// The bytes of Q, K, V, mask and O.
double MovedBytes(const Problem& problem);

struct CostModel {
  static constexpr size_t kTypes = 3;  // cuDNN takes the first of DType's
  using PerType = std::array<double, kTypes>;

  // Each piece is packed, copied in, computed, copied out and unpacked.
  struct Device {
    double run_seconds = 0;            // of a piece that is next to nothing
    double lane_bytes_per_second = 0;  // through one lane
    double bytes_per_second = 0;       // through all of them at once
    PerType flops_per_second{};

    double Seconds(const Work& work) const;
  };
  // All threads, which wait for memory while others compute.
  struct Cpu {
    double bytes_per_second = 0;
    PerType flops_per_second{};

    double Seconds(const Work& work) const;
  };

  Device device;
  Cpu cpu;
};

// What a device is measured by.
struct DeviceSamples {
  // Of one head with `length` queries and as many keys, such that a lane holds it as FP32.
  DeviceSamples(int64_t length, int lanes);

  Problem tiny;
  Problem windowed;               // next to no operations on the tensors of `full`
  Problem windowed_in_all_lanes;  // as many of it as there are lanes
  Problem full;                   // in BF16; FP16 is as fast
  Problem full_fp32;

  std::vector<Problem> all() const {
    return {tiny, windowed, windowed_in_all_lanes, full, full_fp32};
  }
};

// Seconds of a problem, alone on the machine.
using Stopwatch = absl::FunctionRef<absl::StatusOr<double>(const Problem&)>;
// What the problem is to who is measured.
using Workload = absl::FunctionRef<Work(const Problem&)>;

// Errors are the stopwatch's.
absl::StatusOr<CostModel::Device> MeasureDevice(const DeviceSamples& samples, Stopwatch seconds_of,
                                                Workload work_of);
absl::StatusOr<CostModel::Cpu> MeasureCpu(int threads, Stopwatch seconds_of, Workload work_of);

// Seconds of a plan for the pool's workers, on tensors of its own: the best of some runs. Cancelled
// once `go_on` says no, which is asked before each of them; Unavailable where another backend stood
// in.
absl::StatusOr<double> SecondsOf(const Plan& plan, ThreadPool& pool, const Clock& clock,
                                 absl::FunctionRef<bool()> go_on);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_COST_MODEL_H_
