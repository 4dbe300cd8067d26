#include "attention/cudnn/cuda_device.h"

#include <array>
#include <chrono>
#include <cstring>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "attention/cudnn/cuda_runtime.h"
#include "attention/cudnn/cuda_shared_memory.h"
#include "attention/cudnn/library.h"
#include "attention/cudnn/probe.h"
#include "attention/cudnn/staging.h"
#include "base/status_macros.h"

namespace rapt::cudnn {
namespace {

constexpr std::chrono::seconds kTrialLimit{120};
constexpr int64_t kTrialBytes = int64_t{16} << 20;

class CudaLane final : public Lane {
 public:
  // `pages` is the device's memory for pages whenever the lane is open.
  CudaLane(const Library& library, const CudaRuntime& runtime, int64_t bytes,
           std::byte* const& pages)
      : library_(library), runtime_(runtime), bytes_(bytes), pages_(pages) {}
  ~CudaLane() override { Close(); }

  absl::Status Open() {
    void* host = nullptr;
    void* device = nullptr;
    absl::Status status = runtime_.Check(
        "pinned memory",
        runtime_.HostAlloc(&host, static_cast<size_t>(bytes_), cudaHostAllocDefault));
    host_ = static_cast<std::byte*>(host);
    if (status.ok()) {
      status =
          runtime_.Check("device memory", runtime_.Malloc(&device, static_cast<size_t>(bytes_)));
    }
    device_ = static_cast<std::byte*>(device);
    if (status.ok()) {
      status = runtime_.Check("a stream",
                              runtime_.StreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
    }
    if (!status.ok()) return status;
    RAPT_ASSIGN_OR_RETURN(cudnn_, library_.OpenStream(stream_));
    return absl::OkStatus();
  }

  // Ignores errors: they mean that the context and its memory are lost.
  void Close() {
    cudnn_.reset();
    if (stream_ != nullptr) runtime_.StreamDestroy(std::exchange(stream_, nullptr));
    if (device_ != nullptr) runtime_.Free(std::exchange(device_, nullptr));
    if (host_ != nullptr) runtime_.FreeHost(std::exchange(host_, nullptr));
  }

  absl::Span<std::byte> host() override { return {host_, static_cast<size_t>(bytes_)}; }

  absl::Status Run(const SdpaGraph& graph, const CompiledPlan& plan,
                   const ArenaLayout& layout) override {
    absl::Status status =
        runtime_.Check("copying in", Copy(0, layout.outputs, cudaMemcpyHostToDevice));
    if (status.ok()) {
      status = cudnn_->Run(graph, plan, layout, device_, device_ + layout.end, pages_);
    }
    if (status.ok()) {
      status =
          runtime_.Check("copying out", Copy(layout.outputs, layout.end, cudaMemcpyDeviceToHost));
    }
    // Also after an error: nothing of this request may be in flight when the next one starts.
    status.Update(runtime_.Check("running", runtime_.StreamSynchronize(stream_)));
    return status;
  }

  absl::Status SendPages(absl::Span<const PageCopy> copies) override {
    absl::Status status;
    for (const PageCopy& copy : copies) {
      const auto width = static_cast<size_t>(copy.row_bytes);
      status = runtime_.Check(
          "copying pages in",
          runtime_.Memcpy2DAsync(pages_ + copy.to, static_cast<size_t>(copy.step),
                                 host_ + copy.from, width, width, static_cast<size_t>(copy.rows),
                                 cudaMemcpyHostToDevice, stream_));
      if (!status.ok()) break;
    }
    status.Update(runtime_.Check("sending pages", runtime_.StreamSynchronize(stream_)));
    return status;
  }

 private:
  cudaError_t Copy(int64_t begin, int64_t end, cudaMemcpyKind kind) {
    const bool in = kind == cudaMemcpyHostToDevice;
    return runtime_.MemcpyAsync((in ? device_ : host_) + begin, (in ? host_ : device_) + begin,
                                static_cast<size_t>(end - begin), kind, stream_);
  }

  const Library& library_;
  const CudaRuntime& runtime_;
  const int64_t bytes_;
  std::byte* const& pages_;
  std::byte* host_ = nullptr;
  std::byte* device_ = nullptr;
  cudaStream_t stream_ = nullptr;
  std::unique_ptr<Stream> cudnn_;
};

class CudaDevice final : public Device {
 public:
  ~CudaDevice() override {
    lanes_.clear();
    if (pages_ != nullptr) runtime_.Free(pages_);
  }

  static absl::StatusOr<std::unique_ptr<Device>> Open(const CudaOptions& options) {
    RAPT_ASSIGN_OR_RETURN(const Library* const library, Library::Load(options.libraries));
    RAPT_ASSIGN_OR_RETURN(const CudaRuntime runtime, FindCudaRuntime(*library));
    int devices = 0;
    absl::Status status = runtime.Check("no GPU", runtime.GetDeviceCount(&devices));
    if (status.ok() && devices == 0) status = absl::UnavailableError("no GPU");
    if (!status.ok()) return absl::FailedPreconditionError(status.message());
    auto device = std::unique_ptr<CudaDevice>(new CudaDevice(*library, runtime, options));
    RAPT_RETURN_IF_ERROR(device->Start());
    return device;
  }

  std::string kind() const override { return kind_; }
  int lanes() const override { return static_cast<int>(lanes_.size()); }
  Lane& lane(int n) override { return *lanes_[static_cast<size_t>(n)]; }
  int64_t arena_bytes() const override { return arena_bytes_; }
  int64_t page_memory_bytes() const override { return page_memory_bytes_; }

  absl::StatusOr<CompiledPlan> Compile(const SdpaGraph& graph) override {
    return library_.Compile(graph, properties_);
  }

  absl::Status Restart() override {
    for (const auto& lane : lanes_) lane->Close();
    shared_memory_.Invalidate();
    RAPT_RETURN_IF_ERROR(runtime_.Check("resetting", runtime_.DeviceReset()));
    return AllocateAll();
  }

  absl::StatusOr<std::shared_ptr<const DeviceMemory>> OpenShared(absl::string_view raw_handle,
                                                                 int64_t device_id,
                                                                 int64_t byte_size) override {
    return shared_memory_.Open(raw_handle, device_id, byte_size);
  }

 private:
  CudaDevice(const Library& library, const CudaRuntime& runtime, const CudaOptions& options)
      : library_(library),
        runtime_(runtime),
        arena_bytes_(options.memory_bytes / options.lanes / kAlignment * kAlignment),
        page_memory_bytes_(options.page_memory_bytes) {
    for (int n = 0; n < options.lanes; ++n) {
      lanes_.push_back(std::make_unique<CudaLane>(library_, runtime_, arena_bytes_, pages_));
    }
  }

  absl::Status Start() {
    RAPT_RETURN_IF_ERROR(runtime_.Check("the GPU", runtime_.SetDevice(0)));
    RAPT_ASSIGN_OR_RETURN(properties_, library_.Describe(0));
    kind_ = absl::StrCat(
        library_.version(), " ",
        absl::StrReplaceAll(properties_, {{"\n", ""}}));  // must be one line of a plan file
    return AllocateAll();
  }

  // REQUIRES: the device has no memory of this, or has lost it.
  absl::Status AllocateAll() {
    void* pages = nullptr;
    absl::Status status;
    if (page_memory_bytes_ > 0) {
      status = runtime_.Check("device memory for pages",
                              runtime_.Malloc(&pages, static_cast<size_t>(page_memory_bytes_)));
    }
    pages_ = static_cast<std::byte*>(pages);
    for (const auto& lane : lanes_) {
      if (status.ok()) status = lane->Open();
    }
    return status;
  }

  static constexpr int64_t kAlignment = 256;

  const Library& library_;
  const CudaRuntime runtime_;
  const int64_t arena_bytes_;
  const int64_t page_memory_bytes_;
  std::byte* pages_ = nullptr;
  CudaSharedMemory shared_memory_{runtime_};
  std::string properties_;
  std::string kind_;
  std::vector<std::unique_ptr<CudaLane>> lanes_;
};

// Checks that the device computes correctly: a single key has weight 1, so the output is its value.
absl::Status Try(CudaOptions options) {
  options.lanes = 1;
  options.memory_bytes = kTrialBytes;
  options.page_memory_bytes = 0;
  RAPT_ASSIGN_OR_RETURN(std::unique_ptr<Device> device, CudaDevice::Open(options));
  const Problem problem{.dtype = DType::kBFloat16,
                        .batch = 1,
                        .query_heads = 1,
                        .kv_heads = 1,
                        .query_length = 8,
                        .key_length = 1,
                        .head_size = 64,
                        .value_head_size = 64};
  const SdpaGraph graph = GraphOf(problem);
  RAPT_ASSIGN_OR_RETURN(const CompiledPlan plan, device->Compile(graph));
  constexpr uint16_t kOne = 0x3f80;
  const std::vector<uint16_t> ones(8 * 64, kOne);
  const auto view = [&](int64_t rows) {
    const std::array<int64_t, 4> dims = {1, 1, rows, 64};
    return TensorView{reinterpret_cast<const std::byte*>(ones.data()), DType::kBFloat16, dims,
                      RowMajorStrides(dims)};
  };
  Arguments arguments;
  arguments.inputs[Role::kQ] = view(8);
  arguments.inputs[Role::kK] = arguments.inputs[Role::kV] = view(1);
  Lane& lane = device->lane(0);
  const Part part{&problem, &arguments};
  const Staging staging(graph, {&part, 1});
  staging.StageInputs(lane.host().data());
  RAPT_RETURN_IF_ERROR(lane.Run(graph, plan, staging.layout()));
  if (std::memcmp(lane.host().data() + staging.layout().output, ones.data(),
                  8 * 64 * sizeof(kOne)) == 0) {
    return absl::OkStatus();
  }
  return absl::InternalError("the GPU computes wrong results");
}

}  // namespace

absl::StatusOr<std::unique_ptr<Device>> OpenCudaDevice(const CudaOptions& options) {
  RAPT_RETURN_IF_ERROR(TryInChild([&] { return Try(options); }, kTrialLimit));
  return CudaDevice::Open(options);
}

}  // namespace rapt::cudnn
