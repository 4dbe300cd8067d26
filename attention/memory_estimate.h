// Estimates the bytes that attention needs in addition to its tensors, for three algorithms, and
// those of inputs in place of a mask or bias of all pairs.
#ifndef RAPT_ATTENTION_MEMORY_ESTIMATE_H_
#define RAPT_ATTENTION_MEMORY_ESTIMATE_H_

#include <cstdint>
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
};

inline constexpr int64_t kEstimateChunk = 256;

// Returns MakePlan()'s errors, and InvalidArgument if sizes overflow.
absl::StatusOr<MemoryEstimate> EstimateMemory(const Problem& problem, const PlanOptions& options);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MEMORY_ESTIMATE_H_
