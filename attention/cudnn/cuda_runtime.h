// The functions of the CUDA runtime that rapt uses, looked up in the loaded library.
#ifndef RAPT_ATTENTION_CUDNN_CUDA_RUNTIME_H_
#define RAPT_ATTENTION_CUDNN_CUDA_RUNTIME_H_

#include <cuda_runtime_api.h>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/cudnn/library.h"

namespace rapt::cudnn {

// Each member is the CUDA function of that name with the prefix "cuda".
struct CudaRuntime {
  decltype(&::cudaGetDeviceCount) GetDeviceCount;
  decltype(&::cudaSetDevice) SetDevice;
  decltype(&::cudaDeviceReset) DeviceReset;
  decltype(&::cudaGetErrorString) GetErrorString;
  cudaError_t (*Malloc)(void**, size_t);
  decltype(&::cudaFree) Free;
  decltype(&::cudaFreeHost) FreeHost;
  cudaError_t (*HostAlloc)(void**, size_t, unsigned int);
  decltype(&::cudaStreamCreateWithFlags) StreamCreateWithFlags;
  decltype(&::cudaStreamDestroy) StreamDestroy;
  decltype(&::cudaStreamSynchronize) StreamSynchronize;
  decltype(&::cudaMemcpyAsync) MemcpyAsync;
  decltype(&::cudaMemcpy2DAsync) Memcpy2DAsync;
  decltype(&::cudaIpcOpenMemHandle) IpcOpenMemHandle;
  decltype(&::cudaIpcCloseMemHandle) IpcCloseMemHandle;
  cudaError_t (*GetDriverEntryPointByVersion)(const char*, void**, unsigned int, unsigned long long,
                                              cudaDriverEntryPointQueryResult*);
  cudaError_t (*EventCreate)(cudaEvent_t*);
  cudaError_t (*EventRecord)(cudaEvent_t, cudaStream_t);
  decltype(&::cudaEventElapsedTime) EventElapsedTime;

  // Returns Unavailable with `what` and CUDA's message on error.
  absl::Status Check(const char* what, cudaError_t error) const;
};

// Returns FailedPrecondition if the library lacks one of them.
absl::StatusOr<CudaRuntime> FindCudaRuntime(const Library& library);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_CUDA_RUNTIME_H_
