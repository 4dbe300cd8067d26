// A layer in files: config.json and model.safetensors, as Hugging Face's models are stored.
#ifndef RAPT_ATTENTION_LAYER_FILES_LAYER_FILES_H_
#define RAPT_ATTENTION_LAYER_FILES_LAYER_FILES_H_

#include <memory>
#include <set>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/layer/files/safetensors.h"
#include "attention/layer/layer.h"
#include "base/thread_pool.h"

namespace rapt {

inline constexpr char kConfigFile[] = "config.json";
inline constexpr char kWeightsFile[] = "model.safetensors";

// Movable. `weights` lie in the file.
struct LayerFiles {
  Safetensors file;
  LayerConfig config = {};
  LayerWeights weights = {};
  std::string naming = {};             // one of NamingNames()
  std::string prefix = {};             // of the names of tensors
  std::set<std::string> tensors = {};  // that `weights` refers to
};

// "torch, llama, bert, gpt2, t5, plain"
std::string NamingNames();

// Returns InvalidArgument with the file, the tensor or setting, what it is and what it must be; a
// tensor of the wrong shape is found by LayerBytes(). NotFound if a file can't be read.
absl::StatusOr<LayerFiles> ReadLayerFiles(const std::string& folder);

// The same for the text of config.json and the tensors of an index.
absl::StatusOr<LayerFiles> ReadLayerFiles(absl::string_view config, Safetensors file);

// Packs the weights, after which the file is not used. Returns what MakeLayer() of layer.h returns,
// or Aborted if the file was changed since it was opened.
absl::StatusOr<std::shared_ptr<const Layer>> MakeLayer(const LayerFiles& files, ThreadPool& pool);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_FILES_LAYER_FILES_H_
