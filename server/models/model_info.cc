#include "server/models/model_info.h"

#include <utility>

namespace rapt {

ModelInfo LayerModel(const std::string& name, std::shared_ptr<const Layer> layer) {
  const LayerConfig& config = layer->config();
  const DType dtype = layer->dtype();
  ModelInfo model{.model = ModelId(std::make_shared<const std::string>(name)),
                  .inputs = {{"query", Role::kQ, dtype, 3, true, false, config.embed_size},
                             {"key", Role::kK, dtype, 3, false, false, *config.key_embed_size},
                             {"value", Role::kV, dtype, 3, false, false, *config.value_embed_size},
                             {"attn_mask", Role::kMask, DType::kBool, 4},
                             {"nonpad_kv_seqlen", Role::kKeyLengths, DType::kInt64, 1}},
                  .outputs = {{"Y", Role::kY, dtype, 3, true, false, layer->output_size()},
                              {"weights", kLayerWeights, dtype, 4}}};
  if (config.pad_token_id) model.inputs.push_back({"input_ids", kInputIds, DType::kInt64, 2});
  model.layer = std::move(layer);
  model.has_ended = std::make_shared<std::atomic<bool>>(false);
  return model;
}

}  // namespace rapt
