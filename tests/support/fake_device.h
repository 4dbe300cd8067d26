// A device that is memory of its own and a slow loop: bytes really move, and what comes back is
// what cuDNN documents, its undefined rows included.
#ifndef RAPT_TESTS_SUPPORT_FAKE_DEVICE_H_
#define RAPT_TESTS_SUPPORT_FAKE_DEVICE_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "attention/cudnn/device.h"
#include "base/aligned_buffer.h"

namespace rapt::test {

// Thread-safe as far as a Device is.
class FakeDevice final : public cudnn::Device {
 public:
  // What tests look at and change while the device runs; it outlives the device.
  struct Controls {
    std::atomic<int> failures{0};          // so many runs from now on fail
    std::atomic<int> failing_restarts{0};  // likewise
    std::atomic<int> runs{0};              // that were asked for
    std::atomic<int> restarts{0};
    std::atomic<int> compilations{0};
    std::atomic<int64_t> most_bytes{0};       // of a lane's memory that a run asked for
    std::atomic<bool> computes{true};         // or leaves the results as they are
    std::atomic<bool> declines{false};        // no graph compiles
    std::atomic<int64_t> workspace_bytes{0};  // that kernels take
    // Called by every run, before it computes, and by every compilation; may block.
    std::function<void()> on_run = [] {};
    // What is to be computed; likewise.
    std::function<void(const cudnn::SdpaGraph&, const cudnn::ArenaLayout&)> on_graph =
        [](const cudnn::SdpaGraph&, const cudnn::ArenaLayout&) {};
    std::function<void()> on_compile = [] {};
  };

  FakeDevice(Controls& controls, int lanes, int64_t arena_bytes);
  ~FakeDevice() override;

  std::string kind() const override { return "fake"; }
  int lanes() const override { return static_cast<int>(lanes_.size()); }
  cudnn::Lane& lane(int n) override;
  int64_t arena_bytes() const override { return arena_bytes_; }
  absl::StatusOr<cudnn::CompiledPlan> Compile(const cudnn::SdpaGraph& graph) override;
  absl::Status Restart() override;
  // The handle is the name of an object of POSIX shared memory, filled up with zeros; the device is
  // number 0.
  absl::StatusOr<std::shared_ptr<const DeviceMemory>> OpenShared(absl::string_view raw_handle,
                                                                 int64_t device_id,
                                                                 int64_t byte_size) override;

 private:
  class FakeLane;

  Controls& controls_;
  const int64_t arena_bytes_;
  std::vector<std::unique_ptr<FakeLane>> lanes_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_FAKE_DEVICE_H_
