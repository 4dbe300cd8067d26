// cuDNN, loaded at run time: no program of ours is linked with it.
#ifndef RAPT_SERVER_ATTENTION_CUDNN_LIBRARY_H_
#define RAPT_SERVER_ATTENTION_CUDNN_LIBRARY_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "server/attention/cudnn/graph.h"

namespace rapt::cudnn {

// What a graph's tensors are called when it runs.
enum class TensorId : int64_t {
  kQuery = 1,
  kKey,
  kValue,
  kBias,
  kQueryLengths,
  kKeyLengths,
  kOutput,
  kLse,
};

// A graph's kernels. The bytes serve the same version of cuDNN on the same kind of device.
struct CompiledPlan {
  std::vector<uint8_t> bytes;
  int64_t workspace_bytes = 0;  // of device memory, beside the tensors
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

 private:
  explicit Library(int64_t version) : version_(version) {}

  int64_t version_;
};

}  // namespace rapt::cudnn

#endif  // RAPT_SERVER_ATTENTION_CUDNN_LIBRARY_H_
