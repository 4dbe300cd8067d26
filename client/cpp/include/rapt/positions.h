// Calls of the models rotary_embedding and positional_encoding: positions outside of attention.
#ifndef RAPT_CLIENT_RAPT_POSITIONS_H_
#define RAPT_CLIENT_RAPT_POSITIONS_H_

#include <cstdint>
#include <optional>

#include "rapt/tensor.h"

namespace rapt::client {

// Rotary position embedding, the ONNX operator RotaryEmbedding-23. Both caches, or rope_theta.
struct RotaryCall {
  TensorView x = {};  // [B, H, S, D], or [B, S, H * D] with num_heads; a float type

  // kFloat32 or X's type: [M, r/2], a row for each position, or [B, S, r/2], one for each token.
  std::optional<TensorView> cos_cache = {};
  std::optional<TensorView> sin_cache = {};
  std::optional<TensorView> position_ids = {};  // kInt64, [B, S]; absent: token s is at position s

  bool interleaved = false;               // rotates pairs (2t, 2t + 1), otherwise (t, t + r/2)
  int64_t num_heads = 0;                  // of a tensor of rank 3
  int64_t rotary_embedding_dim = 0;       // r, even: the first r numbers of each head; 0: D
  std::optional<double> rope_theta = {};  // positive: angle t is position * rope_theta^(-2t/r)
};

// Y = X + PE: sines and cosines, or the rows of a table.
struct PositionalEncodingCall {
  TensorView x = {};                     // [..., S, E]; a float type
  std::optional<TensorView> table = {};  // [M, E] with M >= S; kFloat32 or X's type
  // PE[s, 2i] = sin(s * base^(-2i/E)), PE[s, 2i + 1] = cos(the same). Absent: 10000.
  std::optional<double> base = {};
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_POSITIONS_H_
