// A model as its callers see it: its name and tensors.
#ifndef RAPT_SERVER_MODELS_MODEL_INFO_H_
#define RAPT_SERVER_MODELS_MODEL_INFO_H_

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "attention/layer/layer.h"
#include "attention/operator_schema.h"
#include "server/request.h"

namespace rapt {

using ModelTensor = TensorSchema;

// Of a layer it is made when it is loaded. The weights stay, and stay charged to the budget, until
// the last call that holds it has ended.
struct ModelInfo {
  ModelId model;
  std::vector<ModelTensor> inputs;
  std::vector<ModelTensor> outputs;
  std::shared_ptr<const Layer> layer = nullptr;  // of a layer, together with its memory
  // Of a layer: becomes true when it is replaced or unloaded. Its address identifies the load.
  std::shared_ptr<std::atomic<bool>> has_ended = nullptr;

  absl::string_view name() const { return model.name(); }
};

using ModelInfoPtr = std::shared_ptr<const ModelInfo>;

ModelInfo LayerModel(const std::string& name, std::shared_ptr<const Layer> layer);

}  // namespace rapt

#endif  // RAPT_SERVER_MODELS_MODEL_INFO_H_
