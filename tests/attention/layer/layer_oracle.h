// A layer in float64, by plain loops around the oracle of attention.
#ifndef RAPT_TESTS_ATTENTION_LAYER_LAYER_ORACLE_H_
#define RAPT_TESTS_ATTENTION_LAYER_LAYER_ORACLE_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "attention/layer/layer.h"
#include "tests/support/tensor.h"

namespace rapt::test {

// A layer, a call of it, and the tensors of both.
struct LayerCase {
  DType dtype = DType::kFloat32;   // of inputs
  DType weight = DType::kFloat32;  // of the file
  int64_t batch = 2, queries = 5;
  std::optional<int64_t> tokens = std::nullopt;  // of key; absent: self-attention
  bool has_value = false;                        // else value is key
  LayerConfig config = {.embed_size = 24, .query_heads = 4};
  int64_t output_size = 20;
  bool has_q = true, has_k = true, has_v = true, has_o = true;
  bool transposed = false;
  bool has_biases = true;
  bool has_extra_key = false;
  bool has_norms = false;
  bool has_sinks = false;
  int64_t buckets = 0;  // of relative_attention_bias; 0: none
  bool is_causal = false;
  std::vector<int64_t> lengths = {};
  bool has_ids = false;
  std::optional<DType> mask = std::nullopt;
  Shape mask_shape = {};
  std::optional<Dropout> dropout = std::nullopt;
  bool wants_weights = true;
  bool wants_averaged_weights = true;

  int64_t key_embed() const { return config.key_embed_size.value_or(config.embed_size); }
  int64_t value_embed() const { return config.value_embed_size.value_or(key_embed()); }
  int64_t heads() const { return config.query_heads; }
  int64_t kv_heads() const { return config.kv_heads.value_or(heads()); }
  int64_t head_size() const { return config.head_size.value_or(config.embed_size / heads()); }
  int64_t value_head_size() const { return config.value_head_size.value_or(head_size()); }
  int64_t sk() const { return tokens.value_or(queries); }
  int64_t keys() const { return sk() + (has_extra_key ? 1 : 0); }
  int64_t y_size() const { return has_o ? output_size : heads() * value_head_size(); }
};

// Matrices are [1, 1, out, in], vectors [1, 1, 1, n], inputs [1, B, S, E].
struct LayerTensors {
  Tensor wq, wk, wv, wo;
  Tensor bq, bk, bv, bo;
  Tensor extra_k, extra_v, q_norm, k_norm, sinks, additive;
  Tensor table;  // [1, 1, buckets, Hq]
  Tensor query, key, value;
  Tensor ids;   // [1, 1, B, Sk]
  Tensor mask;  // mask_shape with leading axes of 1
};

LayerTensors RandomLayer(const LayerCase& c, uint64_t seed);

LayerWeights WeightsOf(const LayerCase& c, const LayerTensors& t);
LayerCall CallOf(const LayerCase& c);

struct LayerWant {
  std::vector<double> y, weights, averaged;
  double most_score = 0;  // the largest magnitude of a finite score
};

LayerWant WantOf(const LayerCase& c, const LayerTensors& t);

}  // namespace rapt::test

#endif  // RAPT_TESTS_ATTENTION_LAYER_LAYER_ORACLE_H_
