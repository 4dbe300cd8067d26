// Estimates of the memory that attention needs in addition to its tensors.
#ifndef RAPT_CALL_RAPT_MEMORY_H_
#define RAPT_CALL_RAPT_MEMORY_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "rapt/data_type.h"

namespace rapt {

// Inputs in place of a mask or bias of all pairs of queries and keys, by the size that the sizes of
// the call leave open. H is 1, or with per_head the number of heads. 0 or false: not given.
struct CompactInputs {
  int64_t block_q = 0;  // block_mask [1, H, Sq / block_q, T / block_k], rounded up; both or neither
  int64_t block_k = 0;
  int64_t selected_indices = 0;  // N of [B, H, Sq, N]
  // Biases by distance, at most one.
  bool alibi = false;
  int64_t bias_table = 0;     // N of [N, Hq], in Q's type
  int64_t relative_bias = 0;  // 2c + 1 of [H, 2c + 1], in Q's type
  bool per_head = false;      // H is Hq; Hkv for selected_indices

  bool operator==(const CompactInputs&) const = default;
};

// The attributes of the operators of linear time that decide their memory.
struct LinearTimeOptions {
  int64_t lsh_hashes = 4;         // num_hashes of attention by hashing
  int64_t lsh_chunk_length = 64;  // its chunk_length
  int64_t favor_features = 0;     // num_features of FAVOR; 0: floor(D ln D)

  bool operator==(const LinearTimeOptions&) const = default;
};

// Self-attention of several lengths.
struct MemoryQuestion {
  int64_t batch = 1;
  int64_t query_heads = 1;
  int64_t kv_heads = 0;  // 0: query_heads
  std::vector<int64_t> lengths = {};
  int64_t head_size = 64;
  int64_t value_head_size = 0;  // 0: head_size
  DType dtype = DType::kFloat32;
  CompactInputs inputs = {};
  LinearTimeOptions linear_time = {};
};

struct InputEstimate {
  std::string name;  // "block_mask", "selected_indices", "alibi", "bias_table" or "relative_bias"
  int64_t bytes = 0;
  // What it needs less than a BOOL mask or a bias of its type, [B, Hq, Sq, T], in which an axis is
  // 1 if the input is the same along it; negative if more.
  int64_t saved_bytes = 0;
};

// An operator in place of exact attention.
struct OperatorEstimate {
  int64_t workspace_bytes = 0;  // the exact workspace of the plan
  int64_t state_bytes = 0;      // what later tokens need instead of keys and values
  std::string plan;
  std::string refusal;  // why the operator does not take these sizes; then the rest is empty
};

struct LayerEstimate {
  int64_t weight_bytes = 0;   // of the memory budget, as long as the layer is loaded
  int64_t charged_bytes = 0;  // of the memory budget by a call: Y and workspace, in pooled buffers
};

// Of a layer only the length, tensor_bytes, fused_bytes, the plan and `layer` are set.
struct MemoryEstimate {
  int64_t length = 0;        // of the queries
  int64_t tensor_bytes = 0;  // Q, K, V and Y, needed in any case; of a layer its inputs and Y
  // In addition to tensor_bytes:
  int64_t standard_bytes = 0;  // the whole score matrix [B, Hq, Sq, T], in the type of the softmax
  // The scores of one block of keys for every query, and m, l and O of each row.
  int64_t chunked_bytes = 0;
  int64_t fused_bytes = 0;  // the exact workspace of the plan
  std::string plan = {};
  std::vector<InputEstimate> inputs = {};  // those in place of a mask or bias
  // Self-attention of the keys, without the other inputs.
  OperatorEstimate lsh = {};     // of the length rounded up to whole chunks; drawn rotations
  OperatorEstimate linear = {};  // with the feature map FAVOR and a drawn projection
  std::optional<LayerEstimate> layer = std::nullopt;
};

}  // namespace rapt

#endif  // RAPT_CALL_RAPT_MEMORY_H_
