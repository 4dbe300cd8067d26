// Attention by locality-sensitive hashing: each token attends to those that hash alike. Kitaev,
// Kaiser and Levskaya 2020, "Reformer: The Efficient Transformer".
#ifndef RAPT_ATTENTION_MECHANISM_LSH_LSH_ATTENTION_H_
#define RAPT_ATTENTION_MECHANISM_LSH_LSH_ATTENTION_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "absl/status/statusor.h"
#include "attention/mechanism/lsh/lsh_shape.h"
#include "attention/operator_schema.h"
#include "attention/tensor_operator.h"

namespace rapt {

// Hash rounds of a call, each of which is a stage of its plan.
inline constexpr int64_t kMostHashes = 1024;

extern const OperatorSchema kLshAttention;

struct LshAttentionCall {
  // kQ is Q [B, H, S, D], of Hugging Face's Reformer also K; kK is K of the simple form. kV is V
  // [B, H, S, Dv]; kLshRotations, [H or 1, D, num_hashes, C], C = num_buckets / 2, or D in the
  // simple form; kKeyLengths, INT64 [B].
  InputMap<std::optional<TensorSpec>> inputs;
  // kLshBuckets is an output, INT32 [B, H, num_hashes, S]. The bucket of padding is num_buckets.
  bool wants_buckets = false;

  LshForm form = LshForm::kReformer;
  int64_t num_hashes = 1;
  int64_t num_buckets = 0;   // even; 0: the largest power of two up to 2 S / chunk_length, or D
  int64_t chunk_length = 0;  // divides S, or is at least S: then nothing is hashed
  std::optional<int64_t> chunks_before = std::nullopt;  // absent: 1, or 0 in the simple form
  std::optional<int64_t> chunks_after = std::nullopt;   // absent: 0
  bool is_causal = false;
  std::optional<double> scale = std::nullopt;   // absent: 1 / sqrt(D)
  std::optional<uint64_t> seed = std::nullopt;  // of the rotations, if they are not given
};

// Returns InvalidArgument with the tensor or attribute, its value and the allowed values.
absl::StatusOr<std::shared_ptr<const TensorOperator>> MakeLshAttention(
    const LshAttentionCall& call);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LSH_LSH_ATTENTION_H_
