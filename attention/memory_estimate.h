// Estimates the bytes that attention needs besides its tensors, for three ways of computing it.
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
  int64_t standard_bytes =
      0;  // the score matrix [B, Hq, Sq, T], in the type the softmax is computed in
  int64_t chunked_bytes =
      0;  // scores of kEstimateChunk keys for every query, and each row's m, l and O
  int64_t fused_bytes = 0;  // the plan's workspace
  std::string plan;
};

inline constexpr int64_t kEstimateChunk = 256;

// Returns MakePlan()'s errors, and InvalidArgument if sizes overflow.
absl::StatusOr<MemoryEstimate> EstimateMemory(const Problem& problem, const PlanOptions& options);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MEMORY_ESTIMATE_H_
