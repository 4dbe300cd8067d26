#include "attention/memory_estimate.h"

#include <algorithm>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "base/checked_math.h"

namespace rapt {
namespace {

// Checked, because huge head sizes with many threads overflow int64.
absl::StatusOr<int64_t> WorkspaceBytes(const Plan& plan) {
  std::optional<int64_t> bytes = CheckedMul(plan.threads, plan.worker_workspace_bytes);
  if (bytes) bytes = CheckedAdd(*bytes, plan.shared_workspace_bytes);
  if (bytes) return *bytes;
  return absl::InvalidArgumentError(absl::StrCat("the workspace of ", plan.threads,
                                                 " threads with ", plan.worker_workspace_bytes,
                                                 " bytes each overflows 64 bits"));
}

// No overflow: the indices are checked, and masks are smaller than the score matrix.
int64_t SavedMaskBytes(const Problem& p) {
  const int64_t pairs = p.query_length * p.total_keys();
  int64_t saved = 0;
  if (p.block_mask) {
    const auto& [batch, heads, rows, columns] = *p.block_mask;
    saved += batch * heads * (pairs - rows * columns);
  }
  if (p.selected) {
    const int64_t heads = p.selected->heads;
    saved += p.batch * (heads == 1 ? 1 : p.query_heads) * pairs -
             p.batch * heads * p.query_length * p.selected->count * SizeOf(DType::kInt32);
  }
  return saved;
}

}  // namespace

absl::StatusOr<MemoryEstimate> EstimateMemory(const Problem& p, const PlanOptions& options) {
  const absl::StatusOr<Plan> plan = MakePlan(p, options);
  if (!plan.ok()) return plan.status();
  const absl::StatusOr<int64_t> workspace_bytes = WorkspaceBytes(*plan);
  if (!workspace_bytes.ok()) return workspace_bytes.status();
  // The sizes of a valid problem do not overflow at eight bytes per element, nor do sums of four.
  const int64_t element = SizeOf(p.dtype);
  const int64_t real = SizeOf(p.accumulator());
  const int64_t query_rows = p.batch * p.query_heads * p.query_length;
  const int64_t key_rows = p.batch * p.kv_heads * p.total_keys();
  MemoryEstimate estimate;
  estimate.tensor_bytes = element * (query_rows + key_rows) * (p.head_size + p.value_head_size);
  estimate.standard_bytes = query_rows * p.total_keys() * real;
  estimate.chunked_bytes =
      query_rows * (std::min(p.total_keys(), kEstimateChunk) + 2 + p.value_head_size) * real;
  estimate.fused_bytes = *workspace_bytes;
  estimate.saved_mask_bytes = SavedMaskBytes(p);
  estimate.plan = plan->Describe();
  return estimate;
}

}  // namespace rapt
