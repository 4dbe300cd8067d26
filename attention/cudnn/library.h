// cuDNN, loaded at run time; no program is linked with it.
#ifndef RAPT_ATTENTION_CUDNN_LIBRARY_H_
#define RAPT_ATTENTION_CUDNN_LIBRARY_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/cudnn/device.h"
#include "attention/cudnn/graph.h"

namespace rapt::cudnn {

// Identifies a graph's tensors at run time.
enum class TensorId : int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kScale,
  kBias,
  kQueryLengths,
  kKeyLengths,
  kQueryOffsets,
  kKeyOffsets,
  kValueOffsets,
  kOutputOffsets,
  kKeyPages,
  kValuePages,
  kOutput,
  kLse,
  kOutputGradient,
  kQueryGradient,
  kKeyGradient,
  kValueGradient,
};

// A cuDNN handle on a stream of the device that was current when it was opened. Not thread-safe.
class Stream {
 public:
  virtual ~Stream() = default;

  // Enqueues the plan's kernels on the stream. `arena` holds the tensors, and `pages` those of a
  // graph with pages; `workspace` is aligned to 256; all are device memory.
  virtual absl::Status Run(const SdpaGraph& graph, const CompiledPlan& plan,
                           const ArenaLayout& layout, std::byte* arena, std::byte* workspace,
                           std::byte* pages) = 0;
};

// Thread-safe once loaded. The libraries stay loaded until the process ends: cuDNN cannot be
// unloaded.
class Library {
 public:
  // Loads the CUDA 13 runtime, its run-time compiler and cuDNN 9 from the first of `directories`,
  // separated by ':', that has them; if empty, from the system's search path. The first call
  // decides for the process. FailedPrecondition names the missing library.
  static absl::StatusOr<const Library*> Load(absl::string_view directories);

  // 91900 is 9.19.0.
  int64_t version() const { return version_; }

  // Compiles the graph for the kind of device that `properties` describes in cuDNN's JSON; the
  // device need not be present. Takes seconds. Returns Unimplemented with cuDNN's message if cuDNN
  // does not support the graph, Internal if it fails.
  absl::StatusOr<CompiledPlan> Compile(const SdpaGraph& graph, absl::string_view properties) const;

  // Returns the properties of a device for Compile().
  absl::StatusOr<std::string> Describe(int device) const;

  // `stream` is a cudaStream_t.
  absl::StatusOr<std::unique_ptr<Stream>> OpenStream(void* stream) const;

  // Returns a function of the CUDA runtime, or null if it does not exist.
  void* RuntimeFunction(const char* name) const;

 private:
  Library(int64_t version, void* runtime) : version_(version), runtime_(runtime) {}

  int64_t version_;
  void* runtime_;
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_LIBRARY_H_
