// The ONNX operator RotaryEmbedding-23, with angles also from rope_theta.
#ifndef RAPT_ATTENTION_POSITIONS_ROTARY_EMBEDDING_H_
#define RAPT_ATTENTION_POSITIONS_ROTARY_EMBEDDING_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "attention/operator_schema.h"
#include "attention/positions/tokens.h"
#include "attention/problem.h"
#include "attention/tensor_operator.h"

namespace rapt {

extern const OperatorSchema kRotaryEmbedding;

struct RotaryEmbeddingCall {
  // kTokens is X, [B, H, S, D] or [B, S, H * D] with num_heads; kCosCache and kSinCache, [M, r / 2]
  // or [B, S, r / 2]; kPositionIds, [B, S]. Without ids, token s is at position first_position +
  // s. X may lie where Y does.
  InputMap<std::optional<TensorSpec>> inputs;
  int64_t first_position = 0;  // from 0 to kMaxAxis
  bool interleaved = false;
  int64_t num_heads = 0;
  int64_t rotary_embedding_dim = 0;  // r; 0: D
  std::optional<double> rope_theta = std::nullopt;
  std::optional<RopeScaling> rope_scaling = std::nullopt;  // of rope_theta
};

// Returns InvalidArgument with the tensor or attribute, its value and the allowed values.
absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeRotaryEmbedding(
    const RotaryEmbeddingCall& call);

}  // namespace rapt

#endif  // RAPT_ATTENTION_POSITIONS_ROTARY_EMBEDDING_H_
