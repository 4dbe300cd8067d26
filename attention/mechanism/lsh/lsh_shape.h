// The sizes of a valid call of lsh_attention, and the tensors that attention does not have.
#ifndef RAPT_ATTENTION_MECHANISM_LSH_LSH_SHAPE_H_
#define RAPT_ATTENTION_MECHANISM_LSH_LSH_SHAPE_H_

#include <cstdint>
#include <optional>

#include "attention/roles.h"
#include "attention/tensor_view.h"
#include "rapt/choices.h"

namespace rapt {

inline constexpr Slot kLshRotations = Slot::Input(0);
inline constexpr Slot kLshBuckets = Slot::Output(0);

// The score of a token with itself in the Reformer.
inline constexpr double kLshSelfScore = -1e5;
// Added to the mean square of a key before the square root that divides the key.
inline constexpr double kLshKeyEpsilon = 1e-6;

struct LshShape {
  LshForm form = LshForm::kReformer;
  DType dtype = DType::kFloat32;
  int64_t batch = 0, heads = 0, length = 0;  // B, H, S
  int64_t head_size = 0;                     // D
  int64_t value_head_size = 0;               // Dv
  int64_t num_hashes = 1;
  int64_t buckets = 0;  // also the bucket of padding
  int64_t chunk_length = 0;
  int64_t chunks_before = 0, chunks_after = 0;
  bool is_causal = false;
  double scale = 1;
  bool has_lengths = false;
  bool wants_buckets = false;
  std::optional<DType> rotations = std::nullopt;  // absent: drawn from the seed
  int64_t rotation_heads = 0;                     // H, or 1 for all heads
  uint64_t seed = 0;

  bool empty() const { return batch == 0 || heads == 0 || length == 0; }
  int64_t all_heads() const { return batch * heads; }

  bool is_reformer() const { return form == LshForm::kReformer; }
  Role keys() const { return is_reformer() ? Role::kQ : Role::kK; }
  // The products with rotations that choose a bucket. The Reformer's have two signs, one for each
  // half of the buckets.
  int64_t columns() const { return is_reformer() ? buckets / 2 : buckets; }
  int64_t rotation_head(int64_t h) const { return rotation_heads == 1 ? 0 : h; }

  // Without hashing there is one round with one chunk.
  bool hashes() const { return length > chunk_length; }
  int64_t rounds() const { return hashes() ? num_hashes : 1; }
  int64_t chunk_rows() const { return hashes() ? chunk_length : length; }
  int64_t round_chunks() const { return length / chunk_rows(); }
  int64_t before() const { return hashes() ? chunks_before : 0; }
  int64_t window_chunks() const { return hashes() ? 1 + chunks_before + chunks_after : 1; }
  int64_t window_rows() const { return window_chunks() * chunk_rows(); }
};

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_LSH_LSH_SHAPE_H_
