// Estimates the bytes that attention needs in addition to its tensors, for three algorithms.
#ifndef RAPT_ATTENTION_MEMORY_ESTIMATE_H_
#define RAPT_ATTENTION_MEMORY_ESTIMATE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "attention/plan.h"
#include "attention/problem.h"

namespace rapt {

struct MemoryEstimate {
  int64_t tensor_bytes = 0;  // Q, K, V and Y
  // The score matrix [B, Hq, Sq, T], in the type of the softmax.
  int64_t standard_bytes = 0;
  // The scores of kEstimateChunk keys for every query, and m, l and O of each row.
  int64_t chunked_bytes = 0;
  int64_t fused_bytes = 0;  // the plan's workspace
  // What block mask and selected indices need less than BOOL masks of the same heads, [B, Hq, Sq,
  // T] with axes that broadcast; negative if more.
  int64_t saved_mask_bytes = 0;
  std::string plan;
};

inline constexpr int64_t kEstimateChunk = 256;

// Returns MakePlan()'s errors, and InvalidArgument if sizes overflow.
absl::StatusOr<MemoryEstimate> EstimateMemory(const Problem& problem, const PlanOptions& options);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MEMORY_ESTIMATE_H_
