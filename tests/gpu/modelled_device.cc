// A fake device for the test of gpu_bench.py. It takes the time of a GPU with known round figures
// and computes nothing.
#include <algorithm>
#include <chrono>
#include <cstring>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "base/aligned_buffer.h"
#include "bench/gpu/device_meter.h"

namespace rapt::bench {
namespace {

using cudnn::ArenaLayout;
using cudnn::CompiledPlan;
using cudnn::SdpaGraph;

constexpr double kPinnedBytesPerSecond = 50e9;
constexpr double kPageableBytesPerSecond = 10e9;
constexpr double kFlopsPerSecond = 500e12;
constexpr double kLaunchSeconds = 5e-6;
constexpr int kLanes = 4;

double ComputeSecondsOf(const SdpaGraph& g) {
  double keys = static_cast<double>(g.key_length);  // visible to a query
  if (g.left_bound && g.right_bound) {
    keys = std::min(keys, static_cast<double>(*g.left_bound + *g.right_bound));
  } else if (g.right_bound) {
    keys /= 2;
  }
  const double pairs = static_cast<double>(g.batch * g.query_heads * g.query_length) * keys;
  return 2 * pairs * static_cast<double>(g.head_size + g.value_head_size) / kFlopsPerSecond;
}

class ModelledLane final : public cudnn::Lane {
 public:
  explicit ModelledLane(int64_t bytes) : host_(static_cast<size_t>(bytes)) {}

  absl::Span<std::byte> host() override { return host_.span(); }

  absl::Status Run(const SdpaGraph& graph, const CompiledPlan&,
                   const ArenaLayout& layout) override {
    const double kernel_seconds =
        kLaunchSeconds + (graph.ragged ? RaggedSeconds(graph, layout) : ComputeSecondsOf(graph));
    std::this_thread::sleep_for(
        std::chrono::duration<double>(kernel_seconds + layout.end / kPinnedBytesPerSecond));
    std::fill(host_.data() + layout.outputs, host_.data() + layout.end, std::byte{0});
    return absl::OkStatus();
  }
  absl::Status SendPages(absl::Span<const cudnn::PageCopy>) override {
    return absl::UnimplementedError("pages are not modelled");
  }

 private:
  // Sums over rows of different lengths.
  double RaggedSeconds(const SdpaGraph& graph, const ArenaLayout& layout) const {
    const auto length = [&](int64_t place, int64_t b) {
      int32_t length;
      std::memcpy(&length, host_.data() + place + b * sizeof(length), sizeof(length));
      return length;
    };
    SdpaGraph row = graph;
    row.batch = 1;
    double seconds = 0;
    for (int64_t b = 0; b < graph.batch; ++b) {
      row.query_length = length(layout.query_lengths, b);
      row.key_length = length(layout.key_lengths, b);
      seconds += ComputeSecondsOf(row);
    }
    return seconds;
  }

  AlignedBuffer host_;
};

class ModelledDevice final : public cudnn::Device {
 public:
  explicit ModelledDevice(int64_t memory_bytes) : arena_bytes_(memory_bytes / kLanes) {
    for (int n = 0; n < kLanes; ++n) lanes_.push_back(std::make_unique<ModelledLane>(arena_bytes_));
  }

  std::string kind() const override { return "modelled"; }
  int lanes() const override { return kLanes; }
  cudnn::Lane& lane(int n) override { return *lanes_.at(static_cast<size_t>(n)); }
  int64_t arena_bytes() const override { return arena_bytes_; }
  int64_t page_memory_bytes() const override { return 0; }
  absl::StatusOr<CompiledPlan> Compile(const SdpaGraph& graph) override {
    if (graph.head_size == 64) return absl::UnimplementedError("not this head size");
    return CompiledPlan{std::vector<uint8_t>(1 << 16), 1 << 14};
  }
  absl::Status Restart() override { return absl::OkStatus(); }
  absl::StatusOr<std::shared_ptr<const DeviceMemory>> OpenShared(absl::string_view, int64_t,
                                                                 int64_t) override {
    return absl::UnimplementedError("shared memory is not supported");
  }

 private:
  const int64_t arena_bytes_;
  std::vector<std::unique_ptr<ModelledLane>> lanes_;
};

class ModelledMeter final : public DeviceMeter {
 public:
  std::string properties() const override {
    return R"({"deviceName": "a model of a GPU", "deviceVer": 900, "driverVer": 13000})";
  }
  absl::StatusOr<double> CopySeconds(Direction, bool pinned, int64_t bytes) override {
    return static_cast<double>(bytes) / (pinned ? kPinnedBytesPerSecond : kPageableBytesPerSecond);
  }
  absl::StatusOr<double> KernelSeconds(const SdpaGraph& graph, const CompiledPlan&) override {
    return kLaunchSeconds + ComputeSecondsOf(graph);
  }
};

}  // namespace

absl::StatusOr<MeteredDevice> OpenMeteredDevice(const std::string& libraries,
                                                int64_t memory_bytes) {
  if (libraries == "nowhere") return absl::FailedPreconditionError("cannot load libcudart.so.13");
  return MeteredDevice{std::make_unique<ModelledDevice>(memory_bytes),
                       std::make_unique<ModelledMeter>()};
}

}  // namespace rapt::bench
