#include "server/attention/memory_estimate.h"

#include <algorithm>

#include "server/attention/attention.h"

namespace rapt {

absl::StatusOr<MemoryEstimate> EstimateMemory(const Problem& p, const PlanOptions& options) {
  const absl::StatusOr<Plan> plan = MakePlan(p, options);
  if (!plan.ok()) return plan.status();
  // A valid problem's sizes do not overflow, each in eight bytes an element; their sums are taken
  // of at most four such.
  const int64_t element = SizeOf(p.dtype);
  const int64_t real = SizeOf(p.accumulator());
  const int64_t query_rows = p.batch * p.query_heads * p.query_length;
  const int64_t key_rows = p.batch * p.kv_heads * p.total_keys();
  MemoryEstimate estimate;
  estimate.tensor_bytes = element * (query_rows + key_rows) * (p.head_size + p.value_head_size);
  estimate.standard_bytes = query_rows * p.total_keys() * real;
  estimate.chunked_bytes =
      query_rows * (std::min(p.total_keys(), kEstimateChunk) + 2 + p.value_head_size) * real;
  estimate.fused_bytes = plan->workspace_bytes();
  estimate.plan = plan->Describe();
  return estimate;
}

}  // namespace rapt
