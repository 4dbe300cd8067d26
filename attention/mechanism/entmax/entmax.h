// The normalizers that give some keys a weight of exactly 0: sparsemax (Martins and Astudillo
// 2016), entmax15 and entmax (Peters et al. 2019).
//
//     P = max((alpha - 1) S - tau, 0)^(1 / (alpha - 1)),    with tau such that the sum of P is 1
//
// Written with sigma = (tau + 1) / (alpha - 1), the score that would have the weight 1,
//
//     P = max(1 + (alpha - 1) (S - sigma), 0)^(1 / (alpha - 1))
//
// which keeps its precision for alpha near 1, where P is e^(S - sigma).
#ifndef RAPT_ATTENTION_MECHANISM_ENTMAX_ENTMAX_H_
#define RAPT_ATTENTION_MECHANISM_ENTMAX_ENTMAX_H_

#include <cstdint>

#include "absl/types/span.h"
#include "attention/problem.h"

namespace rapt {

// Returns the alpha of a head, from 1, which is softmax, to 2.
double AlphaOf(const Problem& problem, const Arguments& arguments, int64_t h);

// Turns scores into weights, in float64. Returns whether a score is above -inf; if none is, the
// weights are 0. NaN or +inf among the scores gives NaN. REQUIRES: 1 < alpha <= 2.
bool Entmax(double alpha, absl::Span<double> scores);

}  // namespace rapt

#endif  // RAPT_ATTENTION_MECHANISM_ENTMAX_ENTMAX_H_
