// A layer in files: config.json and model.safetensors, or its shards, as Hugging Face's models are
// stored.
#ifndef RAPT_ATTENTION_LAYER_FILES_LAYER_FILES_H_
#define RAPT_ATTENTION_LAYER_FILES_LAYER_FILES_H_

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/layer/files/safetensors.h"
#include "attention/layer/layer.h"
#include "base/thread_pool.h"

namespace rapt {

inline constexpr char kConfigFile[] = "config.json";
inline constexpr char kWeightsFile[] = "model.safetensors";
inline constexpr char kWeightsIndexFile[] = "model.safetensors.index.json";  // of shards

// Movable. `weights` lie in the file.
struct LayerFiles {
  Safetensors file;
  LayerConfig config = {};
  LayerWeights weights = {};
  std::string naming = {};               // one of NamingNames()
  std::string prefix = {};               // of the names of tensors
  std::set<std::string> tensors = {};    // that `weights` refers to
  std::vector<std::string> unread = {};  // names of the configuration that are not read
};

// The files of a folder, which may have several layers.
struct LayerFolder {
  std::string config;  // text of config.json
  std::optional<Safetensors> file = std::nullopt;
};

// A prefix under which the tensors of a naming begin.
struct FoundLayer {
  std::string prefix;
  std::string naming;
};

// "torch, llama, bert, gpt2, t5, plain"
std::string NamingNames();

// Returns NotFound with the file that can't be read, InvalidArgument for one that is malformed.
absl::StatusOr<LayerFolder> OpenLayerFolder(const std::string& folder);

// The layers of a file, in the order of their names. With rapt.naming, or a model_type that is
// known, only those of that naming.
std::vector<FoundLayer> FindLayers(absl::string_view config, const Safetensors& file);

// Returns InvalidArgument with the file, the tensor or setting, what it is and what it must be; a
// tensor of the wrong shape is found by LayerBytes(). Errors of OpenLayerFolder().
absl::StatusOr<LayerFiles> ReadLayerFiles(const std::string& folder);

// The same for the text of config.json and the tensors of a file, under another prefix than
// config.json has if one is given.
absl::StatusOr<LayerFiles> ReadLayerFiles(absl::string_view config, Safetensors file,
                                          const std::optional<std::string>& prefix = std::nullopt);

// Packs the weights, after which the file is not used. Returns what MakeLayer() of layer.h returns,
// or Aborted if the file was changed since it was opened.
absl::StatusOr<std::shared_ptr<const Layer>> MakeLayer(const LayerFiles& files, ThreadPool& pool);

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_FILES_LAYER_FILES_H_
