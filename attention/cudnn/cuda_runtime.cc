#include "attention/cudnn/cuda_runtime.h"

#include <type_traits>

#include "absl/strings/str_cat.h"

namespace rapt::cudnn {

absl::Status CudaRuntime::Check(const char* what, cudaError_t error) const {
  if (error == cudaSuccess) return absl::OkStatus();
  return absl::UnavailableError(absl::StrCat(what, ": ", GetErrorString(error)));
}

absl::StatusOr<CudaRuntime> FindCudaRuntime(const Library& library) {
  CudaRuntime runtime{};
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto& function) {
    void* found = library.RuntimeFunction(name);
    if (found == nullptr) missing = name;
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(found);
  };
  find("cudaGetDeviceCount", runtime.GetDeviceCount);
  find("cudaSetDevice", runtime.SetDevice);
  find("cudaDeviceReset", runtime.DeviceReset);
  find("cudaGetErrorString", runtime.GetErrorString);
  find("cudaMalloc", runtime.Malloc);
  find("cudaFree", runtime.Free);
  find("cudaFreeHost", runtime.FreeHost);
  find("cudaHostAlloc", runtime.HostAlloc);
  find("cudaStreamCreateWithFlags", runtime.StreamCreateWithFlags);
  find("cudaStreamDestroy", runtime.StreamDestroy);
  find("cudaStreamSynchronize", runtime.StreamSynchronize);
  find("cudaMemcpyAsync", runtime.MemcpyAsync);
  find("cudaMemcpy2DAsync", runtime.Memcpy2DAsync);
  find("cudaIpcOpenMemHandle", runtime.IpcOpenMemHandle);
  find("cudaIpcCloseMemHandle", runtime.IpcCloseMemHandle);
  find("cudaGetDriverEntryPointByVersion", runtime.GetDriverEntryPointByVersion);
  find("cudaEventCreate", runtime.EventCreate);
  find("cudaEventRecord", runtime.EventRecord);
  find("cudaEventElapsedTime", runtime.EventElapsedTime);
  if (missing == nullptr) return runtime;
  return absl::FailedPreconditionError(absl::StrCat("the CUDA runtime lacks ", missing));
}

}  // namespace rapt::cudnn
