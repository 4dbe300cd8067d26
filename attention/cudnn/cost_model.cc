#include "attention/cudnn/cost_model.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <limits>

#include "attention/attention.h"
#include "base/aligned_buffer.h"
#include "base/status_macros.h"

namespace rapt::cudnn {
namespace {

constexpr int64_t kHeadSize = 128;
constexpr int64_t kTinyLength = 8;
constexpr int64_t kWindow = 64;  // keys on either side

// Takes a few milliseconds per thread on the CPU; larger than its caches.
constexpr int64_t kPrefillLength = 512;
constexpr int64_t kHeadsPerThread = 2;
constexpr int64_t kDecodeLength = 16 << 10;
constexpr int64_t kDecodeHeads = 8;

// Differences of times below this fraction of the minuend are noise.
constexpr double kMinRemainder = 0.05;

constexpr int kRuns = 3;

Problem SampleOf(DType dtype, int64_t batch, int64_t heads, int64_t queries, int64_t keys) {
  return {.dtype = dtype,
          .batch = batch,
          .query_heads = heads,
          .kv_heads = heads,
          .query_length = queries,
          .key_length = keys,
          .head_size = kHeadSize,
          .value_head_size = kHeadSize};
}

Problem Windowed(Problem problem) {
  problem.left_window = problem.right_window = kWindow;
  return problem;
}

// Returns `seconds` less the part explained by `others`.
double Without(double seconds, double others) {
  return std::max(seconds - others, kMinRemainder * seconds);
}

size_t IndexOf(DType dtype) { return static_cast<size_t>(dtype); }

// Every element is a normal number in every type: 0x3c3c is 1.06 as FP16 and 0.01 as BF16 or as the
// upper half of an FP32.
AlignedBuffer FilledBuffer(int64_t bytes) {
  AlignedBuffer buffer(static_cast<size_t>(bytes));
  std::memset(buffer.data(), 0x3c, buffer.size());
  return buffer;
}

// A tensor [B, H, rows, D].
class SampleTensor {
 public:
  SampleTensor(const Problem& p, int64_t heads, int64_t rows, int64_t size)
      : dtype_(p.dtype),
        dims_{p.batch, heads, rows, size},
        buffer_(FilledBuffer(p.batch * heads * rows * size * SizeOf(p.dtype))) {}

  TensorView View() const { return {buffer_.data(), dtype_, dims_, RowMajorStrides(dims_)}; }
  MutableTensorView MutableView() {
    return {buffer_.data(), dtype_, dims_, RowMajorStrides(dims_)};
  }

 private:
  const DType dtype_;
  const std::array<int64_t, 4> dims_;
  AlignedBuffer buffer_;
};

}  // namespace

double MovedBytes(const Problem& p) {
  const auto number = [](int64_t n) { return static_cast<double>(n); };
  const double rows =
      number(p.query_heads) * number(p.query_length) + number(p.kv_heads) * number(p.total_keys());
  double bytes =
      number(p.batch) * rows * number(p.head_size + p.value_head_size) * number(SizeOf(p.dtype));
  if (p.backward) bytes *= 2;
  if (p.mask) {
    double elements = 1;
    for (const int64_t dim : p.mask->dims) elements *= number(dim);
    bytes += elements * number(SizeOf(p.mask->dtype));
  }
  return bytes;
}

double CostModel::Device::Seconds(const Work& work) const {
  const auto lanes = static_cast<double>(work.lanes);
  const double bandwidth = std::min(lanes * lane_bytes_per_second, bytes_per_second);
  return static_cast<double>(work.pieces) / lanes * run_seconds + work.bytes / bandwidth +
         work.flops / flops_per_second[IndexOf(work.dtype)];
}

double CostModel::Cpu::Seconds(const Work& work) const {
  return std::max(work.bytes / bytes_per_second,
                  work.flops / flops_per_second[IndexOf(work.dtype)]);
}

DeviceSamples::DeviceSamples(int64_t length, int lanes)
    : tiny(SampleOf(DType::kBFloat16, 1, 1, kTinyLength, kTinyLength)),
      windowed(Windowed(SampleOf(DType::kBFloat16, 1, 1, length, length))),
      windowed_in_all_lanes(Windowed(SampleOf(DType::kBFloat16, lanes, 1, length, length))),
      full(SampleOf(DType::kBFloat16, 1, 1, length, length)),
      full_fp32(SampleOf(DType::kFloat32, 1, 1, length, length)) {}

absl::StatusOr<CostModel::Device> MeasureDevice(const DeviceSamples& samples, Stopwatch seconds_of,
                                                Workload work_of) {
  std::vector<double> seconds;
  std::vector<Work> works;
  for (const Problem& problem : samples.all()) {
    RAPT_ASSIGN_OR_RETURN(const double one, seconds_of(problem));
    seconds.push_back(one);
    works.push_back(work_of(problem));
  }
  enum { kTiny, kWindowed, kInAllLanes, kFull, kFullFp32 };

  CostModel::Device device;
  device.run_seconds = seconds[kTiny];
  // Both move the same tensors: the difference is operations alone.
  const double half_rate =
      (works[kFull].flops - works[kWindowed].flops) / Without(seconds[kFull], seconds[kWindowed]);
  const auto bandwidth = [&](int n) {
    return works[n].bytes / Without(seconds[n], device.run_seconds + works[n].flops / half_rate);
  };
  device.lane_bytes_per_second = bandwidth(kWindowed);
  device.bytes_per_second = bandwidth(kInAllLanes);
  const double fp32_seconds =
      Without(seconds[kFullFp32],
              device.run_seconds + works[kFullFp32].bytes / device.lane_bytes_per_second);
  device.flops_per_second[IndexOf(DType::kFloat16)] = half_rate;
  device.flops_per_second[IndexOf(DType::kBFloat16)] = half_rate;
  device.flops_per_second[IndexOf(DType::kFloat32)] = works[kFullFp32].flops / fp32_seconds;
  return device;
}

absl::StatusOr<CostModel::Cpu> MeasureCpu(int threads, Stopwatch seconds_of, Workload work_of) {
  CostModel::Cpu cpu;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    const Problem prefill =
        SampleOf(dtype, 1, kHeadsPerThread * threads, kPrefillLength, kPrefillLength);
    RAPT_ASSIGN_OR_RETURN(const double seconds, seconds_of(prefill));
    cpu.flops_per_second[IndexOf(dtype)] = work_of(prefill).flops / seconds;
  }
  const Problem decode = SampleOf(DType::kBFloat16, 1, kDecodeHeads, 1, kDecodeLength);
  RAPT_ASSIGN_OR_RETURN(const double seconds, seconds_of(decode));
  cpu.bytes_per_second = work_of(decode).bytes / seconds;
  return cpu;
}

absl::StatusOr<double> SecondsOf(const Plan& plan, ThreadPool& pool, const Clock& clock,
                                 absl::FunctionRef<bool()> go_on) {
  const Problem& p = plan.problem;
  const SampleTensor query(p, p.query_heads, p.query_length, p.head_size);
  const SampleTensor key(p, p.kv_heads, p.key_length, p.head_size);
  const SampleTensor value(p, p.kv_heads, p.key_length, p.value_head_size);
  SampleTensor output(p, p.query_heads, p.query_length, p.value_head_size);
  AlignedBuffer workspace(static_cast<size_t>(plan.workspace_bytes()));
  std::atomic<const Backend*> fallback{nullptr};
  Arguments arguments;
  arguments.inputs[Role::kQ] = query.View();
  arguments.inputs[Role::kK] = key.View();
  arguments.inputs[Role::kV] = value.View();
  arguments.outputs[Role::kY] = output.MutableView();
  arguments.piece_fallback = &fallback;

  auto best = std::chrono::nanoseconds::max();
  for (int run = 0; run < 1 + kRuns; ++run) {
    if (!go_on()) return absl::CancelledError("the measurement was interrupted by a signal");
    const Instant begin = clock.Now();
    RAPT_RETURN_IF_ERROR(Run(plan, arguments, workspace.span(), pool));
    if (fallback != nullptr) return absl::UnavailableError("a fallback computed the sample");
    if (run > 0) best = std::min<std::chrono::nanoseconds>(best, clock.Now() - begin);  // warm
  }
  constexpr double kMinSeconds = 1e-9;  // clock resolution; keeps rates finite
  return std::max(std::chrono::duration<double>(best).count(), kMinSeconds);
}

}  // namespace rapt::cudnn
