// A fake device with its own memory that computes by a slow loop. It copies all data, and its
// results are those that cuDNN documents, including undefined rows.
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

// As thread-safe as a Device.
class FakeDevice final : public cudnn::Device {
 public:
  // State that tests read and change while the device runs. REQUIRES: outlives the device.
  struct Controls {
    std::atomic<int> failures{0};          // how many of the next runs fail
    std::atomic<int> failing_restarts{0};  // the same for restarts
    std::atomic<int> runs{0};              // including failed ones
    std::atomic<int> restarts{0};
    std::atomic<int> compilations{0};
    std::atomic<int64_t> most_bytes{0};  // the most lane memory that a run used
    std::atomic<int64_t> sent_page_bytes{0};
    std::atomic<bool> computes{true};         // false: leaves the outputs unchanged
    std::atomic<bool> declines{false};        // true: compiles no graph
    std::atomic<int64_t> workspace_bytes{0};  // of all kernels
    // Called by every run, before it computes, and by every compilation. May block.
    std::function<void()> on_run = [] {};
    // Called with the graph of every run. May block.
    std::function<void(const cudnn::SdpaGraph&, const cudnn::ArenaLayout&)> on_graph =
        [](const cudnn::SdpaGraph&, const cudnn::ArenaLayout&) {};
    std::function<void()> on_compile = [] {};
  };

  FakeDevice(Controls& controls, int lanes, int64_t arena_bytes, int64_t page_memory_bytes = 0);
  ~FakeDevice() override;

  std::string kind() const override { return "fake"; }
  int lanes() const override { return static_cast<int>(lanes_.size()); }
  cudnn::Lane& lane(int n) override;
  int64_t arena_bytes() const override { return arena_bytes_; }
  int64_t page_memory_bytes() const override { return static_cast<int64_t>(pages_.size()); }
  absl::StatusOr<cudnn::CompiledPlan> Compile(const cudnn::SdpaGraph& graph) override;
  absl::Status Restart() override;
  // The handle is the name of a POSIX shared memory object, padded with zeros. The device is number
  // 0.
  absl::StatusOr<std::shared_ptr<const DeviceMemory>> OpenShared(absl::string_view raw_handle,
                                                                 int64_t device_id,
                                                                 int64_t byte_size) override;

 private:
  class FakeLane;

  void LosePages();

  Controls& controls_;
  const int64_t arena_bytes_;
  AlignedBuffer pages_;
  std::vector<std::unique_ptr<FakeLane>> lanes_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_FAKE_DEVICE_H_
