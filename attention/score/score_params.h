// Converts a problem to the parameters of the score policies.
#ifndef RAPT_ATTENTION_SCORE_SCORE_PARAMS_H_
#define RAPT_ATTENTION_SCORE_SCORE_PARAMS_H_

#include <cstddef>
#include <limits>

#include "attention/half.h"
#include "attention/problem.h"
#include "attention/score/score.h"

namespace rapt {

Element ElementOf(DType dtype);
// `real` is the type of the scores.
ScoreParams ScoreParamsOf(const Problem& problem, const Arguments& arguments, DType real);

// Returns a row of a mask or bias; never null. A row without columns hides every key.
inline const std::byte* MaskRow(const TensorView& view, int64_t b, int64_t h, int64_t i) {
  static constexpr std::byte kNoColumns{};
  return view.dims[3] == 0 ? &kNoColumns : view.Row(b, h, i);
}

// Returns -inf if the problem has no sinks.
inline double SinkOf(const Problem& p, const Arguments& a, int64_t h) {
  if (!p.head_sink) return -std::numeric_limits<double>::infinity();
  return LoadElement(a.inputs[Role::kHeadSink].Row(h, 0, 0), *p.head_sink, 0);
}

// Which keys of query i of head h are visible, without the selection. REQUIRES: the problem is
// sparse.
SparseRow SparseRowOf(const Problem& problem, const Arguments& arguments, int64_t b, int64_t h,
                      int64_t i);

// Sets the bits of the keys that a query selects: `bits` has SelectedWords(problem) words.
// REQUIRES: the problem has a selection.
int64_t SelectedWords(const Problem& problem);
void SetSelectedBits(const Problem& problem, const Arguments& arguments, int64_t b, int64_t h,
                     int64_t i, uint64_t* bits);

// Without the biases by distance and SparseRow, which the caller's memory holds. Inline: it runs
// for each row, and the rows of a tiny problem are cheap.
inline ScoreRow ScoreRowOf(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i) {
  const KeyRange visible = VisibleKeys(p, a.key_lengths, b, i);
  return {.begin = visible.begin,
          .end = visible.end,
          .mask = p.mask ? MaskRow(a.inputs[Role::kMask], b, h, i) : nullptr,
          .bias = p.bias ? MaskRow(a.inputs[Role::kBias], b, h, i) : nullptr,
          .relative = nullptr,
          .sparse = nullptr,
          .sink = SinkOf(p, a, h)};
}

}  // namespace rapt

#endif  // RAPT_ATTENTION_SCORE_SCORE_PARAMS_H_
