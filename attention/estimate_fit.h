// Whether estimates of softmax attention, FAVOR+ and LSH, could replace a call for its inputs.
#ifndef RAPT_ATTENTION_ESTIMATE_FIT_H_
#define RAPT_ATTENTION_ESTIMATE_FIT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "attention/problem.h"

namespace rapt {

// Whether the estimates know the problem: plain dot products and softmax, causal or not.
bool HasEstimates(const Problem& problem);

// What is measured on rows of weights. Sums over rows; may be added.
struct EstimateFit {
  int64_t rows = 0;
  // Of each row, the mean of |a + b|^2 by weight, with a and b the query and key times sqrt(scale).
  double squared_norms = 0;
  // Of each row, the sum of its kLshKeys largest weights.
  double reachable_weights = 0;

  void Merge(const EstimateFit& other);
};

// The features of FAVOR+, and the keys that a row meets at most in 4 rounds of LSH with chunks of
// 64 that see the one before, for which the fit is stated.
inline constexpr int64_t kFavorFeatures = 256;
inline constexpr int64_t kLshKeys = 4 * 2 * 64;

// Measures row i of a head of queries. `weights` are those of its T keys, and are reordered.
// REQUIRES: HasEstimates(problem); the row sees a key.
EstimateFit MeasureRow(const Problem& problem, const Arguments& arguments, int64_t b, int64_t h,
                       int64_t i, absl::Span<double> weights);

// Says in words whether each estimate is useless, with the figures. REQUIRES: fit.rows > 0.
std::vector<std::string> Explain(const Problem& problem, const EstimateFit& fit);

}  // namespace rapt

#endif  // RAPT_ATTENTION_ESTIMATE_FIT_H_
