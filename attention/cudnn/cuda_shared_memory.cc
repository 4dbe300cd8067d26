#include "attention/cudnn/cuda_shared_memory.h"

#include <cstring>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/invalid.h"
#include "base/mutex.h"
#include "base/status_macros.h"

namespace rapt::cudnn {
namespace {

constexpr int kDevice = 0;  // the device that CudaDevice uses

// Returns the size of an allocation as reported by cuMemGetAddressRange(), regardless of what its
// owner claims. An access beyond it would destroy the device context of all requests.
absl::StatusOr<int64_t> AllocatedBytes(const CudaRuntime& runtime, void* base) {
  using GetAddressRange = int (*)(uintptr_t*, size_t*, uintptr_t);
  constexpr unsigned kVersion = 12000;
  void* function = nullptr;
  cudaDriverEntryPointQueryResult found{};
  RAPT_RETURN_IF_ERROR(runtime.Check(
      "the driver", runtime.GetDriverEntryPointByVersion("cuMemGetAddressRange", &function,
                                                         kVersion, cudaEnableDefault, &found)));
  uintptr_t begin = 0;
  size_t bytes = 0;
  if (function == nullptr || reinterpret_cast<GetAddressRange>(function)(
                                 &begin, &bytes, reinterpret_cast<uintptr_t>(base)) != 0) {
    return absl::UnavailableError("the CUDA driver does not report the size of the allocation");
  }
  return static_cast<int64_t>(bytes - (reinterpret_cast<uintptr_t>(base) - begin));
}

}  // namespace

// Serializes copies with each other and with device resets.
struct CudaSharedMemory::State {
  explicit State(const CudaRuntime& runtime) : runtime(runtime) {}

  class Memory;

  const CudaRuntime runtime;
  Mutex mutex;
  int64_t resets ABSL_GUARDED_BY(mutex) = 0;
};

class CudaSharedMemory::State::Memory final : public DeviceMemory {
 public:
  Memory(std::shared_ptr<State> state, std::byte* base, int64_t size, int64_t resets)
      : state_(std::move(state)), base_(base), size_(size), resets_(resets) {}

  ~Memory() override {
    MutexLock lock(state_->mutex);
    if (state_->resets == resets_) state_->runtime.IpcCloseMemHandle(base_);
  }

  int64_t size() const override { return size_; }

  absl::Status Read(int64_t offset, absl::Span<std::byte> target) const override {
    return Copy(target.data(), base_ + offset, target.size(), cudaMemcpyDeviceToHost);
  }
  absl::Status Write(int64_t offset, absl::Span<const std::byte> source) const override {
    return Copy(base_ + offset, source.data(), source.size(), cudaMemcpyHostToDevice);
  }

 private:
  absl::Status Copy(void* to, const void* from, size_t bytes, cudaMemcpyKind kind) const {
    MutexLock lock(state_->mutex);
    if (state_->resets != resets_) {
      return absl::UnavailableError(
          "the device was reset; unregister the memory and register it again");
    }
    const CudaRuntime& runtime = state_->runtime;
    absl::Status status =
        runtime.Check("copying", runtime.MemcpyAsync(to, from, bytes, kind, nullptr));
    // Needed for pageable memory, too: the copy may only have been staged.
    status.Update(runtime.Check("copying", runtime.StreamSynchronize(nullptr)));
    return status;
  }

  const std::shared_ptr<State> state_;
  std::byte* const base_;
  const int64_t size_;
  const int64_t resets_;
};

CudaSharedMemory::CudaSharedMemory(const CudaRuntime& runtime)
    : state_(std::make_shared<State>(runtime)) {}

absl::StatusOr<std::shared_ptr<const DeviceMemory>> CudaSharedMemory::Open(
    absl::string_view raw_handle, int64_t device_id, int64_t byte_size) {
  cudaIpcMemHandle_t handle;
  if (raw_handle.size() != sizeof(handle)) {
    return Invalid("raw_handle has ", raw_handle.size(), " bytes; it must have ", sizeof(handle));
  }
  if (device_id != kDevice) {
    return Invalid("device_id is ", device_id, "; this server uses device ", kDevice);
  }
  std::memcpy(&handle, raw_handle.data(), sizeof(handle));
  const CudaRuntime& runtime = state_->runtime;
  MutexLock lock(state_->mutex);
  void* base = nullptr;
  const cudaError_t error = runtime.IpcOpenMemHandle(&base, handle, cudaIpcMemLazyEnablePeerAccess);
  if (error != cudaSuccess) {
    return Invalid("raw_handle is not a valid CUDA IPC handle: ", runtime.GetErrorString(error));
  }
  absl::StatusOr<int64_t> allocated = AllocatedBytes(runtime, base);
  if (allocated.ok() && (byte_size < 1 || byte_size > *allocated)) {
    allocated = Invalid("byte_size is ", byte_size, "; it must be 1 to ", *allocated,
                        ", the allocation's size");
  }
  if (!allocated.ok()) {
    runtime.IpcCloseMemHandle(base);
    return allocated.status();
  }
  return std::make_shared<State::Memory>(state_, static_cast<std::byte*>(base), byte_size,
                                         state_->resets);
}

void CudaSharedMemory::Invalidate() {
  MutexLock lock(state_->mutex);
  ++state_->resets;
}

}  // namespace rapt::cudnn
