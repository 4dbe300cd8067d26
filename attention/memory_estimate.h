// Estimates the bytes that attention needs in addition to its tensors, for three algorithms of
// exact attention and two of linear time, and those of inputs in place of a mask or bias of all
// pairs.
#ifndef RAPT_ATTENTION_MEMORY_ESTIMATE_H_
#define RAPT_ATTENTION_MEMORY_ESTIMATE_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "rapt/memory.h"

namespace rapt {

// Gives the problem these inputs; Validate() returns their errors. REQUIRES: its heads and lengths
// are set.
void AddInputs(const CompactInputs& inputs, Problem& problem);

// One of the question's lengths, which EstimateMemory() checks.
Problem SelfAttention(const MemoryQuestion& question, int64_t length);

// Keys in a block of chunked_bytes.
inline constexpr int64_t kEstimateChunk = 256;

// Returns MakePlan()'s errors, and InvalidArgument if sizes overflow or an option of linear time is
// out of range.
absl::StatusOr<MemoryEstimate> EstimateMemory(const Problem& problem, const PlanOptions& options,
                                              const LinearTimeOptions& linear_time = {});

}  // namespace rapt

#endif  // RAPT_ATTENTION_MEMORY_ESTIMATE_H_
