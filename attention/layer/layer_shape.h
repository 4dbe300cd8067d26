// The sizes of a valid call of a layer.
#ifndef RAPT_ATTENTION_LAYER_LAYER_SHAPE_H_
#define RAPT_ATTENTION_LAYER_LAYER_SHAPE_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "attention/layer/packed_layer.h"
#include "attention/problem.h"

namespace rapt {

struct LayerShape {
  std::shared_ptr<const PackedLayer> layer;
  DType dtype = DType::kFloat32;
  int64_t batch = 0;    // B
  int64_t queries = 0;  // Sq
  int64_t tokens = 0;   // Sk, without the key of bias_k
  bool has_key = false;
  bool has_value = false;
  std::optional<MaskShape> mask = std::nullopt;  // attn_mask
  bool has_lengths = false;
  bool has_ids = false;
  bool is_causal = false;
  std::optional<Dropout> dropout = std::nullopt;
  bool wants_weights = false;
  bool wants_averaged_weights = false;
  LayerCache* cache = nullptr;  // then batch is 1

  // Of the first query, and of the first key that is projected.
  int64_t first_position() const { return cache == nullptr ? 0 : cache->position(); }
  const LayerConfig& config() const { return layer->config(); }
  const PackedWeights& weights() const { return layer->weights(); }
  bool has_extra_key() const { return weights().has(Vector::kExtraKey); }
  int64_t keys() const { return tokens + (has_extra_key() ? 1 : 0); }  // T
  int64_t heads() const { return config().query_heads; }
  bool empty() const { return batch == 0 || queries == 0; }
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_LAYER_LAYER_SHAPE_H_
