#include <algorithm>
#include <utility>

#include "absl/functional/function_ref.h"
#include "attention/cudnn/cuda_device.h"
#include "attention/cudnn/cuda_runtime.h"
#include "base/aligned_buffer.h"
#include "bench/gpu/device_meter.h"
#include "bench/random_tensor.h"

namespace rapt::bench {
namespace {

using cudnn::CompiledPlan;
using cudnn::CudaRuntime;
using cudnn::SdpaGraph;

constexpr double kRoundSeconds = 0.1;
constexpr int kMinRuns = 3;
constexpr int kMaxRuns = 2000;

// Never shrinks.
class Memory {
 public:
  enum class Kind { kDevice, kPinned };

  Memory(const CudaRuntime& runtime, Kind kind) : runtime_(runtime), kind_(kind) {}
  ~Memory() { Free(); }
  Memory(const Memory&) = delete;
  Memory& operator=(const Memory&) = delete;

  absl::StatusOr<std::byte*> AtLeast(int64_t bytes) {
    if (bytes <= bytes_) return data_;
    Free();
    void* data = nullptr;
    const auto size = static_cast<size_t>(bytes);
    const cudaError_t error = kind_ == Kind::kDevice
                                  ? runtime_.Malloc(&data, size)
                                  : runtime_.HostAlloc(&data, size, cudaHostAllocDefault);
    if (absl::Status status = runtime_.Check("memory", error); !status.ok()) return status;
    data_ = static_cast<std::byte*>(data);
    bytes_ = bytes;
    return data_;
  }

 private:
  void Free() {
    if (data_ != nullptr) kind_ == Kind::kDevice ? runtime_.Free(data_) : runtime_.FreeHost(data_);
    data_ = nullptr;
    bytes_ = 0;
  }

  const CudaRuntime& runtime_;
  const Kind kind_;
  std::byte* data_ = nullptr;
  int64_t bytes_ = 0;
};

// Its CUDA objects live until the process ends.
class CudaMeter final : public DeviceMeter {
 public:
  static absl::StatusOr<std::unique_ptr<DeviceMeter>> Open(const std::string& libraries) {
    const absl::StatusOr<const cudnn::Library*> library = cudnn::Library::Load(libraries);
    if (!library.ok()) return library.status();
    const absl::StatusOr<CudaRuntime> runtime = cudnn::FindCudaRuntime(**library);
    if (!runtime.ok()) return runtime.status();
    auto meter = std::unique_ptr<CudaMeter>(new CudaMeter(*runtime));
    if (absl::Status status = meter->Start(**library); !status.ok()) return status;
    return meter;
  }

  std::string properties() const override { return properties_; }

  absl::StatusOr<double> CopySeconds(Direction direction, bool pinned, int64_t bytes) override {
    const absl::StatusOr<std::byte*> device = device_.AtLeast(bytes);
    if (!device.ok()) return device.status();
    filled_for_.clear();
    absl::StatusOr<std::byte*> host = pinned ? pinned_.AtLeast(bytes) : Pageable(bytes);
    if (!host.ok()) return host.status();
    return MeanSeconds([&] {
      return direction == Direction::kToDevice
                 ? Copy(*device, *host, bytes, cudaMemcpyHostToDevice)
                 : Copy(*host, *device, bytes, cudaMemcpyDeviceToHost);
    });
  }

  absl::StatusOr<double> KernelSeconds(const SdpaGraph& graph, const CompiledPlan& plan) override {
    const cudnn::ArenaLayout layout = cudnn::LayOut(graph);
    const absl::StatusOr<std::byte*> device = device_.AtLeast(layout.end + plan.workspace_bytes);
    if (!device.ok()) return device.status();
    if (filled_for_ != graph.Key()) {
      std::byte* const numbers = Pageable(layout.output);
      FillWithRandom(graph.dtype, {numbers, static_cast<size_t>(layout.output)});
      absl::Status status = Copy(*device, numbers, layout.output, cudaMemcpyHostToDevice);
      status.Update(Wait());
      if (!status.ok()) return status;
      filled_for_ = graph.Key();
    }
    return MeanSeconds(
        [&] { return cudnn_->Run(graph, plan, layout, *device, *device + layout.end, nullptr); });
  }

 private:
  explicit CudaMeter(const CudaRuntime& runtime) : runtime_(runtime) {}

  absl::Status Start(const cudnn::Library& library) {
    absl::Status status =
        runtime_.Check("a stream", runtime_.StreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    status.Update(runtime_.Check("an event", runtime_.EventCreate(&begin_)));
    status.Update(runtime_.Check("an event", runtime_.EventCreate(&end_)));
    if (!status.ok()) return status;
    absl::StatusOr<std::unique_ptr<cudnn::Stream>> cudnn = library.OpenStream(stream_);
    if (!cudnn.ok()) return cudnn.status();
    cudnn_ = *std::move(cudnn);
    absl::StatusOr<std::string> properties = library.Describe(0);
    if (!properties.ok()) return properties.status();
    properties_ = *std::move(properties);
    return absl::OkStatus();
  }

  std::byte* Pageable(int64_t bytes) {
    if (static_cast<size_t>(bytes) > pageable_.size()) {
      pageable_ = AlignedBuffer(static_cast<size_t>(bytes));
      FillWithRandom(DType::kFloat32, pageable_.span());  // allocates its pages
    }
    return pageable_.data();
  }

  absl::Status Copy(std::byte* to, const std::byte* from, int64_t bytes, cudaMemcpyKind kind) {
    return runtime_.Check(
        "copying", runtime_.MemcpyAsync(to, from, static_cast<size_t>(bytes), kind, stream_));
  }

  absl::Status Wait() { return runtime_.Check("running", runtime_.StreamSynchronize(stream_)); }

  absl::StatusOr<double> MeanSeconds(absl::FunctionRef<absl::Status()> run) {
    absl::StatusOr<double> seconds = SecondsOf(1, run);  // loads the kernels
    if (seconds.ok()) seconds = SecondsOf(1, run);
    if (!seconds.ok()) return seconds;
    const int runs = static_cast<int>(
        std::clamp<double>(kRoundSeconds / std::max(*seconds, 1e-9), kMinRuns, kMaxRuns));
    seconds = SecondsOf(runs, run);
    if (!seconds.ok()) return seconds;
    return *seconds / runs;
  }

  absl::StatusOr<double> SecondsOf(int runs, absl::FunctionRef<absl::Status()> run) {
    absl::Status status = runtime_.Check("an event", runtime_.EventRecord(begin_, stream_));
    for (int n = 0; n < runs && status.ok(); ++n) status = run();
    status.Update(runtime_.Check("an event", runtime_.EventRecord(end_, stream_)));
    status.Update(Wait());
    float milliseconds = 0;
    status.Update(runtime_.Check("a time", runtime_.EventElapsedTime(&milliseconds, begin_, end_)));
    if (!status.ok()) return status;
    return milliseconds / 1e3;
  }

  const CudaRuntime runtime_;
  std::string properties_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
  std::unique_ptr<cudnn::Stream> cudnn_;
  Memory device_{runtime_, Memory::Kind::kDevice};
  Memory pinned_{runtime_, Memory::Kind::kPinned};
  AlignedBuffer pageable_;
  std::string filled_for_;  // the graph whose tensors are in device_
};

}  // namespace

absl::StatusOr<MeteredDevice> OpenMeteredDevice(const std::string& libraries,
                                                int64_t memory_bytes) {
  absl::StatusOr<std::unique_ptr<cudnn::Device>> device =
      cudnn::OpenCudaDevice({.libraries = libraries, .memory_bytes = memory_bytes});
  if (!device.ok()) return device.status();
  absl::StatusOr<std::unique_ptr<DeviceMeter>> meter = CudaMeter::Open(libraries);
  if (!meter.ok()) return meter.status();
  return MeteredDevice{*std::move(device), *std::move(meter)};
}

}  // namespace rapt::bench
