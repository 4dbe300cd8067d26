// cuDNN, loaded at run time: no program of ours is linked with it.
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

// What a graph's tensors are called when it runs.
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
  kOutput,
  kLse,
};

// A cuDNN handle on a stream of the device that was current when it was opened. One thread at a
// time.
class Stream {
 public:
  virtual ~Stream() = default;

  // Puts the plan's kernels on the stream. The tensors lie at `arena`, the workspace, aligned to
  // 256, at `workspace`; both in device memory.
  virtual absl::Status Run(const SdpaGraph& graph, const CompiledPlan& plan,
                           const ArenaLayout& layout, std::byte* arena, std::byte* workspace) = 0;
};

// Thread-safe once loaded. What was opened stays open until the process ends: cuDNN can't be
// unloaded.
class Library {
 public:
  // Opens the CUDA 13 runtime, its run-time compiler and cuDNN 9, from the first of `directories`,
  // which ':' parts, that has them, or with none from where the system looks for libraries. The
  // first call decides for the process. FailedPrecondition says which one is missing.
  static absl::StatusOr<const Library*> Load(absl::string_view directories);

  // 91900 is 9.19.0.
  int64_t version() const { return version_; }

  // Compiles the graph for the kind of device that `properties` describes, in cuDNN's JSON; no such
  // device needs to be here. Takes seconds. Unimplemented, with cuDNN's words, where it declines;
  // Internal where it fails.
  absl::StatusOr<CompiledPlan> Compile(const SdpaGraph& graph, absl::string_view properties) const;

  // The device of that number, as Compile() takes it.
  absl::StatusOr<std::string> Describe(int device) const;

  // `stream` is a cudaStream_t.
  absl::StatusOr<std::unique_ptr<Stream>> OpenStream(void* stream) const;

  // A function of the CUDA runtime; null where it has none of that name.
  void* RuntimeFunction(const char* name) const;

 private:
  Library(int64_t version, void* runtime) : version_(version), runtime_(runtime) {}

  int64_t version_;
  void* runtime_;
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_LIBRARY_H_
