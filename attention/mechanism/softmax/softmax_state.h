// The algebra of online softmax. For one query row, attention over a set of keys is represented by
// its output O and the logarithm of the sum of its exponentials, lse; the results of two disjoint
// sets of keys merge without reading the keys again. The empty set is O = 0, lse = -inf.
//
//     m = max(a, b);  O = (e^(a-m) Oa + e^(b-m) Ob) / (e^(a-m) + e^(b-m));  lse = m + log(e^(a-m) +
//     e^(b-m))
//
// Milakov and Gimelshein 2018 (online normalizer); Dao et al. 2022 (FlashAttention); Ye et al. 2025
// (FlashInfer's state merge).
#ifndef RAPT_ATTENTION_MECHANISM_SOFTMAX_SOFTMAX_STATE_H_
#define RAPT_ATTENTION_MECHANISM_SOFTMAX_SOFTMAX_STATE_H_

#include <cmath>
#include <cstddef>
#include <limits>

#include "absl/types/span.h"

namespace rapt {

// The weights of two partial outputs in their merge, and the merged lse.
template <typename Real>
struct MergeWeights {
  Real a = 0;
  Real b = 0;
  Real lse = -std::numeric_limits<Real>::infinity();
};

// NaN or +inf in either lse gives NaN, as the softmax over all keys does.
template <typename Real>
MergeWeights<Real> WeighMerge(Real lse_a, Real lse_b) {
  constexpr Real kEmpty = -std::numeric_limits<Real>::infinity();
  if (lse_a == kEmpty && lse_b == kEmpty) return {};
  const Real m = lse_b > lse_a ? lse_b : lse_a;
  const Real ea = std::exp(lse_a - m);
  const Real eb = std::exp(lse_b - m);
  const Real sum = ea + eb;
  return {ea / sum, eb / sum, m + std::log(sum)};
}

// Merges the partial result (o_b, lse_b) into (o_a, lse_a) for one query row. Merging with an empty
// part returns the other part bit for bit.
template <typename Real>
void MergeInto(absl::Span<Real> o_a, Real& lse_a, absl::Span<const Real> o_b, Real lse_b) {
  constexpr Real kEmpty = -std::numeric_limits<Real>::infinity();
  if (lse_b == kEmpty) return;
  const MergeWeights<Real> w = WeighMerge(lse_a, lse_b);
  const bool a_empty = lse_a == kEmpty;
  for (size_t d = 0; d < o_a.size(); ++d) o_a[d] = a_empty ? o_b[d] : w.a * o_a[d] + w.b * o_b[d];
  lse_a = a_empty ? lse_b : w.lse;
}

// Merges in a key without a value, O = 0 and lse = `sink`. A sink of -inf changes no bit; an empty
// row, lse = -inf with O = 0, keeps its O.
template <typename Real>
void MergeSink(absl::Span<Real> o, Real& lse, Real sink) {
  constexpr Real kEmpty = -std::numeric_limits<Real>::infinity();
  if (sink == kEmpty) return;
  if (lse == kEmpty) {
    lse = sink;
    return;
  }
  const MergeWeights<Real> w = WeighMerge(lse, sink);
  for (Real& value : o) value *= w.a;
  lse = w.lse;
}

// Folds the partial result (o_b, lse_b) into the running (o, max, sum) of one query row, where o /
// sum is the output so far and max + log(sum) its lse. Unlike MergeInto() it does not divide, so
// that thousands of parts lose no precision. An empty part changes nothing; an empty row, max =
// -inf, becomes the part bit for bit.
template <typename Real>
void FoldInto(absl::Span<Real> o, Real& max, Real& sum, absl::Span<const Real> o_b, Real lse_b) {
  constexpr Real kEmpty = -std::numeric_limits<Real>::infinity();
  if (lse_b == kEmpty) return;
  if (max == kEmpty) {
    for (size_t d = 0; d < o.size(); ++d) o[d] = o_b[d];
    max = lse_b;
    sum = 1;
    return;
  }
  const Real m = lse_b > max ? lse_b : max;
  const Real a = std::exp(max - m);
  const Real b = std::exp(lse_b - m);
  for (size_t d = 0; d < o.size(); ++d) o[d] = a * o[d] + b * o_b[d];
  sum = a * sum + b;
  max = m;
}

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_SOFTMAX_SOFTMAX_STATE_H_
