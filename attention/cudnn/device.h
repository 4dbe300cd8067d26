// The seam between the backend and a device that runs SDPA graphs; tests put one of their own here.
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

// A graph's kernels. The bytes serve the same version of cuDNN on the same kind of device.
struct CompiledPlan {
  std::vector<uint8_t> bytes;
  int64_t workspace_bytes = 0;  // of device memory, beside the tensors
};

// Where a graph's tensors lie in a lane's memory, in bytes from its beginning; the same on host and
// device. What is read comes first, so that one copy takes it there, and one brings the results.
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
  int64_t output = 0;  // from here on it is written
  int64_t lse = 0;
  int64_t end = 0;
};

// Of all batch rows of a graph together, each of which has one of either at least.
struct TokenCounts {
  int64_t queries = 0;
  int64_t keys = 0;
};

// So many keys a kernel reads at once, and so many less one beyond a ragged row's last.
inline constexpr int64_t kTileKeys = 128;

// Tensors are aligned to 256 bytes. The graph's tensors fit into int64, all together. Ragged ones
// have room for so many tokens, and behind the last value for what a kernel reads beyond it.
ArenaLayout LayOut(const SdpaGraph& graph, const TokenCounts& tokens);
// With every batch row as long as it may be.
ArenaLayout LayOut(const SdpaGraph& graph);

// A stream of a device with memory of its own. One caller at a time.
class Lane {
 public:
  virtual ~Lane() = default;

  // The host's side of the arena, aligned to 256.
  virtual absl::Span<std::byte> host() = 0;

  // Copies what is read to the device, runs the graph, copies what is written back; blocks until it
  // is there. The layout's end and the plan's workspace fit into Device::arena_bytes(). Any error
  // means that the device can't be relied on before Device::Restart().
  virtual absl::Status Run(const SdpaGraph& graph, const CompiledPlan& plan,
                           const ArenaLayout& layout) = 0;
};

// Thread-safe but for what it says; lanes live as long as it does.
class Device {
 public:
  virtual ~Device() = default;

  // What plans depend on, for the names of files: "sm90-91900".
  virtual std::string kind() const = 0;

  virtual int lanes() const = 0;
  virtual Lane& lane(int n) = 0;
  // Of each lane.
  virtual int64_t arena_bytes() const = 0;

  // Takes seconds.
  virtual absl::StatusOr<CompiledPlan> Compile(const SdpaGraph& graph) = 0;

  // After an error, while no lane runs: OK where the device can be relied on again.
  virtual absl::Status Restart() = 0;

  // Opens `byte_size` bytes that another process shares by a cudaIpcMemHandle_t. InvalidArgument
  // where the handle opens no memory of that size on this device. A Restart() makes it Unavailable.
  virtual absl::StatusOr<std::shared_ptr<const DeviceMemory>> OpenShared(
      absl::string_view raw_handle, int64_t device_id, int64_t byte_size) = 0;
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_DEVICE_H_
