// Calls of the model lsh_attention: attention by locality-sensitive hashing (Reformer, Kitaev et
// al. 2020).
#ifndef RAPT_CLIENT_RAPT_LSH_H_
#define RAPT_CLIENT_RAPT_LSH_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rapt/choices.h"
#include "rapt/tensor.h"

namespace rapt::client {

using rapt::LshForm;

// S tokens; n: num_buckets; c: chunk_length.
struct LshCall {
  TensorView q = {};                 // [B, H, S, D], a float type; of kReformer queries and keys
  std::optional<TensorView> k = {};  // of kSimple, as q
  TensorView v = {};                 // [B, H, S, Dv], of q's type
  // [H or 1, D, num_hashes, n / 2], of kSimple [H or 1, D, num_hashes, D]; absent: drawn from seed,
  // which is needed.
  std::optional<TensorView> rotations = {};
  std::vector<int64_t> key_lengths = {};  // [B]: later tokens do not count; empty: all tokens do

  LshForm form = LshForm::kReformer;
  int64_t num_hashes = 1;    // rounds, 1 to 1024
  int64_t num_buckets = 0;   // even; 0: the largest power of two up to 2 S / c, or D of kSimple
  int64_t chunk_length = 0;  // divides S, or is at least S: then nothing is hashed
  std::optional<int64_t> chunks_before = {};  // that a chunk sees; default 1, of kSimple 0
  std::optional<int64_t> chunks_after = {};   // default 0
  bool causal = false;                        // kReformer only
  std::optional<double> scale = {};           // default 1 / sqrt(D)
  std::optional<uint64_t> seed = {};          // of the rotations, if they are absent
  bool wants_buckets = false;
  uint64_t priority = 0;  // as in AttendCall
};

struct LshResult {
  Tensor y;                       // [B, H, S, Dv]
  std::optional<Tensor> buckets;  // kInt32, [B, H, num_hashes, S]
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_LSH_H_
