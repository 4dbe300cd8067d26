// Shared memory of other processes, on a fake CUDA runtime and driver.
#include "attention/cudnn/cuda_shared_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <string>

namespace rapt::cudnn {
namespace {

using ::testing::HasSubstr;

// A device with one allocation, shared by the handle "shared".
constexpr size_t kAllocated = 4096;
alignas(256) std::byte allocation[kAllocated];
int open_handles = 0;

int GetAddressRange(uintptr_t* base, size_t* size, uintptr_t) {
  *base = reinterpret_cast<uintptr_t>(allocation);
  *size = kAllocated;
  return 0;
}

CudaRuntime FakeRuntime() {
  CudaRuntime runtime{};
  runtime.GetErrorString = [](cudaError_t) { return "an error of CUDA"; };
  runtime.IpcOpenMemHandle = [](void** memory, cudaIpcMemHandle_t handle, unsigned int) {
    if (std::strcmp(handle.reserved, "shared") != 0) return cudaErrorInvalidValue;
    ++open_handles;
    *memory = allocation;
    return cudaSuccess;
  };
  runtime.IpcCloseMemHandle = [](void*) {
    --open_handles;
    return cudaSuccess;
  };
  runtime.GetDriverEntryPointByVersion = [](const char* name, void** function, unsigned int,
                                            unsigned long long, cudaDriverEntryPointQueryResult*) {
    EXPECT_STREQ(name, "cuMemGetAddressRange");
    *function = reinterpret_cast<void*>(&GetAddressRange);
    return cudaSuccess;
  };
  runtime.MemcpyAsync = [](void* to, const void* from, size_t bytes, cudaMemcpyKind, cudaStream_t) {
    std::memcpy(to, from, bytes);
    return cudaSuccess;
  };
  runtime.StreamSynchronize = [](cudaStream_t) { return cudaSuccess; };
  return runtime;
}

std::string Handle(const std::string& name) {
  std::string handle = name;
  handle.resize(sizeof(cudaIpcMemHandle_t));
  return handle;
}

class CudaSharedMemoryTest : public ::testing::Test {
 protected:
  void TearDown() override { EXPECT_EQ(open_handles, 0); }

  CudaSharedMemory memory_{FakeRuntime()};
};

TEST_F(CudaSharedMemoryTest, IsReadAndWritten) {
  const auto opened = memory_.Open(Handle("shared"), 0, 1024);
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ((*opened)->size(), 1024);
  allocation[100] = std::byte{7};
  std::byte bytes[2];
  ASSERT_TRUE((*opened)->Read(99, bytes).ok());
  EXPECT_EQ(bytes[1], std::byte{7});
  bytes[1] = std::byte{8};
  ASSERT_TRUE((*opened)->Write(1022, bytes).ok());
  EXPECT_EQ(allocation[1023], std::byte{8});
}

TEST_F(CudaSharedMemoryTest, ReportsWhyOpeningFails) {
  const struct {
    std::string handle;
    int64_t device_id;
    int64_t byte_size;
    const char* message;
  } cases[] = {
      {"shared", 0, 1024, "raw_handle has 6 bytes; it must have 64"},
      {Handle("shared"), 1, 1024, "device_id is 1; this server uses device 0"},
      {Handle("other"), 0, 1024, "an error of CUDA"},
      {Handle("shared"), 0, kAllocated + 1, "byte_size is 4097; it must be 1 to 4096"},
      {Handle("shared"), 0, 0, "byte_size is 0"},
  };
  for (const auto& c : cases) {
    const absl::Status status = memory_.Open(c.handle, c.device_id, c.byte_size).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << status;
    EXPECT_THAT(std::string(status.message()), HasSubstr(c.message));
    EXPECT_EQ(open_handles, 0);
  }
}

TEST_F(CudaSharedMemoryTest, ADeviceResetInvalidatesIt) {
  auto opened = memory_.Open(Handle("shared"), 0, kAllocated);
  ASSERT_TRUE(opened.ok()) << opened.status();
  memory_.Invalidate();
  std::byte byte{};
  EXPECT_EQ((*opened)->Read(0, {&byte, 1}).code(), absl::StatusCode::kUnavailable);
  EXPECT_EQ((*opened)->Write(0, {&byte, 1}).code(), absl::StatusCode::kUnavailable);
  opened = absl::UnknownError("released");
  EXPECT_EQ(open_handles, 1)
      << "memory freed by the reset is not closed: its address may be in use again";
  open_handles = 0;
  EXPECT_TRUE(memory_.Open(Handle("shared"), 0, kAllocated).ok()) << "can be opened again";
}

}  // namespace
}  // namespace rapt::cudnn
