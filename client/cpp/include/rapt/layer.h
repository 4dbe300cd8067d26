// Calls of a layer: attention with the projections of a model, which the server has loaded from its
// repository.
#ifndef RAPT_CLIENT_RAPT_LAYER_H_
#define RAPT_CLIENT_RAPT_LAYER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rapt/attend.h"
#include "rapt/tensor.h"

namespace rapt::client {

// The tensors have one float type, unless said otherwise.
struct LayerCall {
  std::string model;                     // its name in the repository
  TensorView query = {};                 // [B, Sq, E]
  std::optional<TensorView> key = {};    // [B, Sk, Ek]; absent: query
  std::optional<TensorView> value = {};  // [B, Sk, Ev]; absent: key
  // As AttendCall::mask: bool, true attends, or added to the scores.
  std::optional<TensorView> mask = {};
  std::vector<int64_t> key_lengths = {};     // [B]: later keys are hidden; empty: none are
  std::optional<TensorView> input_ids = {};  // kInt64 [B, Sk]; keys of the pad token are hidden

  std::optional<bool> causal = {};  // absent: as the layer is configured
  std::optional<Dropout> dropout = {};
  bool wants_weights = false;
  bool averages_weights = false;  // over the heads; otherwise each has its own
  uint64_t priority = 0;          // as in AttendCall
};

struct LayerResult {
  Tensor y;                       // [B, Sq, size of the layer's output]
  std::optional<Tensor> weights;  // [B, H, Sq, T], averaged [B, Sq, T]
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_LAYER_H_
