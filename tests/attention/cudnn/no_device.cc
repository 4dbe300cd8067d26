// A fake libcuda.so.1 without devices, for tests only. cuDNN compiles kernels for a device that is
// only described, but finally loads them through the driver. Here loading succeeds, because nothing
// ever runs, and all other functions return CUDA_ERROR_NO_DEVICE.
#include <cstring>

namespace {

constexpr int kSuccess = 0;
constexpr int kNoDevice = 100;
constexpr int kDriverVersion = 13000;

int Nothing() { return kNoDevice; }

}  // namespace

extern "C" {

int cuDriverGetVersion(int* version) {
  *version = kDriverVersion;
  return kSuccess;
}

int cuGetErrorName(int, const char** name) {
  *name = "CUDA_ERROR_NO_DEVICE";
  return kSuccess;
}

int cuGetErrorString(int, const char** text) {
  *text = "no device";
  return kSuccess;
}

int cuLibraryLoadData(void** library) {
  *library = reinterpret_cast<void*>(&Nothing);
  return kSuccess;
}

int cuLibraryGetKernel(void** kernel) {
  *kernel = reinterpret_cast<void*>(&Nothing);
  return kSuccess;
}

int cuLibraryUnload() { return kSuccess; }
int cuKernelGetAttribute() { return kSuccess; }
int cuKernelSetAttribute() { return kSuccess; }

// The CUDA runtime looks up the other functions by this one.
int cuGetProcAddress_v2(const char* name, void** function) {
  const bool version = std::strcmp(name, "cuDriverGetVersion") == 0;
  const bool lookup = std::strncmp(name, "cuGetProcAddress", 16) == 0;
  *function = version  ? reinterpret_cast<void*>(&cuDriverGetVersion)
              : lookup ? reinterpret_cast<void*>(&cuGetProcAddress_v2)
                       : reinterpret_cast<void*>(&Nothing);
  return kSuccess;
}

// Functions that cuDNN looks up by name.
#define RAPT_NO_DEVICE(name) \
  int name() { return kNoDevice; }
RAPT_NO_DEVICE(cuCtxGetCurrent)
RAPT_NO_DEVICE(cuCtxGetLimit)
RAPT_NO_DEVICE(cuCtxPopCurrent)
RAPT_NO_DEVICE(cuCtxPushCurrent)
RAPT_NO_DEVICE(cuDeviceGet)
RAPT_NO_DEVICE(cuDeviceGetCount)
RAPT_NO_DEVICE(cuInit)
RAPT_NO_DEVICE(cuLaunchCooperativeKernel)
RAPT_NO_DEVICE(cuLaunchKernel)
RAPT_NO_DEVICE(cuLaunchKernelEx)
RAPT_NO_DEVICE(cuLibraryLoadFromFile)
RAPT_NO_DEVICE(cuLinkAddData)
RAPT_NO_DEVICE(cuLinkComplete)
RAPT_NO_DEVICE(cuLinkCreate)
RAPT_NO_DEVICE(cuLinkDestroy)
RAPT_NO_DEVICE(cuOccupancyMaxPotentialClusterSize)
RAPT_NO_DEVICE(cuStreamGetCtx)

}  // extern "C"
