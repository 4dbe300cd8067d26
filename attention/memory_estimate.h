// Estimates the bytes that attention needs in addition to its tensors, for three algorithms of
// exact attention and two of linear time, and those of inputs in place of a mask or bias of all
// pairs.
#ifndef RAPT_ATTENTION_MEMORY_ESTIMATE_H_
#define RAPT_ATTENTION_MEMORY_ESTIMATE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/plan.h"
#include "attention/problem.h"

namespace rapt {

// Inputs in place of a mask or bias of all pairs of queries and keys, by the size that the
// problem's own sizes leave open. 0 or false: not given. H is 1, or with per_head the number of
// heads.
struct CompactInputs {
  int64_t block_q = 0;  // block_mask [1, H, Sq / block_q, T / block_k]; needs both
  int64_t block_k = 0;
  int64_t selected_indices = 0;  // N of [B, H, Sq, N]
  bool alibi = false;
  int64_t bias_table = 0;     // N of [N, Hq], in Q's type
  int64_t relative_bias = 0;  // 2c + 1 of [H, 2c + 1], in Q's type
  bool per_head = false;
};

// Gives the problem these inputs; Validate() returns their errors. REQUIRES: its heads and lengths
// are set.
void AddInputs(const CompactInputs& inputs, Problem& problem);

struct InputEstimate {
  absl::string_view name;  // in kOnnxNames
  int64_t bytes = 0;
  // What it needs less than a BOOL mask or a bias of its type, [B, Hq, Sq, T], in which an axis is
  // 1 if the input is the same along it; negative if more.
  int64_t saved_bytes = 0;
};

// The attributes of the operators of linear time that decide their memory.
struct LinearTimeOptions {
  int64_t lsh_hashes = 4;
  int64_t lsh_chunk_length = 64;
  std::optional<int64_t> favor_features = std::nullopt;  // absent: floor(D ln D)
};

// lsh_attention or linear_attention in place of exact attention.
struct OperatorEstimate {
  int64_t workspace_bytes = 0;  // of the plan
  int64_t state_bytes = 0;      // what later tokens need instead of keys and values
  std::string plan;
  std::string refusal;  // why the operator does not take these sizes; then the rest is empty
};

struct MemoryEstimate {
  int64_t tensor_bytes = 0;  // Q, K, V and Y
  // The score matrix [B, Hq, Sq, T], in the type of the softmax.
  int64_t standard_bytes = 0;
  // The scores of kEstimateChunk keys for every query, and m, l and O of each row.
  int64_t chunked_bytes = 0;
  int64_t fused_bytes = 0;  // the plan's workspace
  std::string plan;
  // Block mask, selected indices and bias by distance, if the problem has them.
  std::vector<InputEstimate> inputs;
  // Self-attention of the keys, without the problem's other inputs.
  OperatorEstimate lsh;     // of the length rounded up to whole chunks; rotations drawn from a seed
  OperatorEstimate linear;  // FAVOR+, with a projection drawn from a seed
};

inline constexpr int64_t kEstimateChunk = 256;

// Returns MakePlan()'s errors, and InvalidArgument if sizes overflow or an option of linear time is
// out of range.
absl::StatusOr<MemoryEstimate> EstimateMemory(const Problem& problem, const PlanOptions& options,
                                              const LinearTimeOptions& linear_time = {});

}  // namespace rapt

#endif  // RAPT_ATTENTION_MEMORY_ESTIMATE_H_
