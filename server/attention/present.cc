#include "server/attention/present.h"

namespace rapt {
namespace {

// Copies `rows` rows of head (b, h) to `target`, beginning at its row `first`.
void CopyRows(const TensorView& source, const MutableTensorView& target, int64_t b, int64_t h,
              int64_t rows, int64_t first) {
  for (int64_t s = 0; s < rows; ++s) source.CopyRow(b, h, s, target.Row(b, h, first + s));
}

}  // namespace

int64_t PresentTasks(const Problem& problem) {
  // Without keys nothing bounds the number of heads, and there is nothing to copy.
  if (!problem.wants_present || problem.total_keys() == 0) return 0;
  return problem.batch * problem.kv_heads;
}

void RunPresentTask(const Problem& p, const Arguments& arguments, int64_t task) {
  const int64_t b = task / p.kv_heads;
  const int64_t h = task % p.kv_heads;
  CopyRows(arguments.past_key, arguments.present_key, b, h, p.past_length, 0);
  CopyRows(arguments.key, arguments.present_key, b, h, p.key_length, p.past_length);
  CopyRows(arguments.past_value, arguments.present_value, b, h, p.past_length, 0);
  CopyRows(arguments.value, arguments.present_value, b, h, p.key_length, p.past_length);
}

}  // namespace rapt
