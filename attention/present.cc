#include "attention/present.h"

#include <algorithm>

namespace rapt {
namespace {

// Approximate size of a task. Bounded, so that other tasks do not wait long for a head with many
// keys.
constexpr int64_t kTaskBytes = 1 << 20;

int64_t RowsPerTask(const Problem& p) {
  const int64_t row_bytes = (p.head_size + p.value_head_size) * SizeOf(p.dtype);
  return kTaskBytes / std::clamp<int64_t>(row_bytes, 1, kTaskBytes);  // heads may be of size 0
}

int64_t TasksPerHead(const Problem& p) {
  return (p.total_keys() + RowsPerTask(p) - 1) / RowsPerTask(p);
}

// Copies rows [begin, end) of head (b, h). The first `past_length` rows of a head come from `past`.
void CopyRows(const TensorView& past, const TensorView& latest, const MutableTensorView& present,
              int64_t b, int64_t h, int64_t past_length, int64_t begin, int64_t end) {
  for (int64_t row = begin; row < end; ++row) {
    const bool is_past = row < past_length;
    const TensorView& source = is_past ? past : latest;
    source.CopyRow(b, h, is_past ? row : row - past_length, present.Row(b, h, row));
  }
}

}  // namespace

int64_t PresentTasks(const Problem& problem) {
  // Without keys there is nothing to copy, and the number of heads is unbounded.
  if (!problem.wants_present || problem.total_keys() == 0) return 0;
  return problem.batch * problem.kv_heads * TasksPerHead(problem);
}

void RunPresentTask(const Problem& p, const Arguments& arguments, int64_t task) {
  const int64_t head = task / TasksPerHead(p);
  const int64_t b = head / p.kv_heads;
  const int64_t h = head % p.kv_heads;
  const int64_t begin = task % TasksPerHead(p) * RowsPerTask(p);
  const int64_t end = std::min(begin + RowsPerTask(p), p.total_keys());
  CopyRows(arguments.inputs[Role::kPastKey], arguments.inputs[Role::kK],
           arguments.outputs[Role::kPresentKey], b, h, p.past_length, begin, end);
  if (p.values_in_keys) return;
  CopyRows(arguments.inputs[Role::kPastValue], arguments.inputs[Role::kV],
           arguments.outputs[Role::kPresentValue], b, h, p.past_length, begin, end);
}

}  // namespace rapt
