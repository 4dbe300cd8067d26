// Fake device memory that tests can make fail.
#ifndef RAPT_TESTS_SUPPORT_FAKE_DEVICE_MEMORY_H_
#define RAPT_TESTS_SUPPORT_FAKE_DEVICE_MEMORY_H_

#include <atomic>
#include <cstring>
#include <vector>

#include "base/device_memory.h"

namespace rapt::test {

class FakeDeviceMemory final : public DeviceMemory {
 public:
  explicit FakeDeviceMemory(size_t bytes) : bytes(bytes) {}

  int64_t size() const override { return static_cast<int64_t>(bytes.size()); }

  absl::Status Read(int64_t offset, absl::Span<std::byte> target) const override {
    if (fails_to_read) return absl::UnavailableError("told to fail reading");
    std::memcpy(target.data(), bytes.data() + offset, target.size());
    return absl::OkStatus();
  }

  absl::Status Write(int64_t offset, absl::Span<const std::byte> source) const override {
    if (fails_to_write) return absl::UnavailableError("told to fail writing");
    std::memcpy(bytes.data() + offset, source.data(), source.size());
    return absl::OkStatus();
  }

  // The device's own bytes, as its other users see them.
  mutable std::vector<std::byte> bytes;
  std::atomic<bool> fails_to_read{false};
  std::atomic<bool> fails_to_write{false};
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_FAKE_DEVICE_MEMORY_H_
