// The interface between the backend and a device that runs SDPA graphs. Tests implement a fake one.
#ifndef RAPT_ATTENTION_CUDNN_DEVICE_H_
#define RAPT_ATTENTION_CUDNN_DEVICE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/cudnn/graph.h"
#include "base/device_memory.h"

namespace rapt::cudnn {

// A graph's kernels. The bytes are valid for one version of cuDNN on one kind of device.
struct CompiledPlan {
  std::vector<uint8_t> bytes;
  int64_t workspace_bytes = 0;  // of device memory, in addition to the tensors
};

// Byte offsets of a graph's tensors in a lane's memory; the same on host and device. Inputs come
// first, so that one copy moves all inputs and another all outputs.
struct ArenaLayout {
  int64_t query = 0;
  int64_t key = 0;
  int64_t value = 0;
  int64_t bias = 0;
  int64_t query_lengths = 0;
  int64_t key_lengths = 0;
  int64_t query_offsets = 0;
  int64_t key_offsets = 0;
  int64_t value_offsets = 0;
  int64_t output_offsets = 0;
  int64_t page_table = 0;
  int64_t output = 0;  // an input of a backward graph, as is lse
  int64_t lse = 0;
  int64_t output_gradient = 0;
  int64_t query_gradient = 0;
  int64_t key_gradient = 0;
  int64_t value_gradient = 0;
  int64_t outputs = 0;  // where the outputs begin
  int64_t end = 0;
};

// Totals over all batch rows of a graph. Each row has at least one query and one key.
struct TokenCounts {
  int64_t queries = 0;
  int64_t keys = 0;
};

// The keys that a kernel reads at once; it may read up to kTileKeys - 1 beyond a ragged row's last.
inline constexpr int64_t kTileKeys = 128;

// Tensors are aligned to 256 bytes. Ragged tensors hold `tokens`; padding after the last value
// covers what a kernel reads beyond it. REQUIRES: the total size fits int64.
ArenaLayout LayOut(const SdpaGraph& graph, const TokenCounts& tokens);
// The layout for batch rows of full length.
ArenaLayout LayOut(const SdpaGraph& graph);

// Rows that are contiguous in a lane's host memory and `step` bytes apart in the device's pages.
struct PageCopy {
  int64_t from = 0;  // offset in Lane::host()
  int64_t to = 0;    // offset in the pages
  int64_t row_bytes = 0;
  int64_t rows = 0;
  int64_t step = 0;
};

// A device stream with its own memory. Not thread-safe.
class Lane {
 public:
  virtual ~Lane() = default;

  // The host's side of the arena, aligned to 256.
  virtual absl::Span<std::byte> host() = 0;

  // Copies the inputs to the device, runs the graph, copies the outputs back; blocks until done.
  // Any error means that the device is unusable until Device::Restart(). REQUIRES: the layout and
  // the plan's workspace fit Device::arena_bytes().
  virtual absl::Status Run(const SdpaGraph& graph, const CompiledPlan& plan,
                           const ArenaLayout& layout) = 0;

  // Copies from host() to the device's pages; blocks until done. Errors as of Run(). REQUIRES: the
  // copies are within page_memory_bytes(), and no lane reads the bytes that they overwrite.
  virtual absl::Status SendPages(absl::Span<const PageCopy> copies) = 0;
};

// Thread-safe except where stated. Lanes live as long as the device.
class Device {
 public:
  virtual ~Device() = default;

  // Identifies the hardware and library version that compiled plans depend on: "sm90-91900".
  virtual std::string kind() const = 0;

  virtual int lanes() const = 0;
  virtual Lane& lane(int n) = 0;
  // Per lane.
  virtual int64_t arena_bytes() const = 0;

  // The memory for pages, which all lanes share; lost by Restart(). 0: none.
  virtual int64_t page_memory_bytes() const = 0;

  // Takes seconds.
  virtual absl::StatusOr<CompiledPlan> Compile(const SdpaGraph& graph) = 0;

  // Recovers from an error. Returns OK if the device is usable again. REQUIRES: no lane is running.
  virtual absl::Status Restart() = 0;

  // Opens `byte_size` bytes that another process shares through a cudaIpcMemHandle_t. Returns
  // InvalidArgument if the handle does not refer to that much memory on this device. After a
  // Restart() the memory returns Unavailable.
  virtual absl::StatusOr<std::shared_ptr<const DeviceMemory>> OpenShared(
      absl::string_view raw_handle, int64_t device_id, int64_t byte_size) = 0;
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_DEVICE_H_
