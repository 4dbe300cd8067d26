#include "attention/estimate_fit.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

#include "absl/strings/str_format.h"
#include "attention/half.h"
#include "attention/variants.h"

namespace rapt {
namespace {

// A relative standard deviation of the weights above which FAVOR+ is useless: outputs, which
// average over keys, then were measured to be off by a half and more.
constexpr double kMostDeviation = 3;
// The share of the weight that LSH has to reach.
constexpr double kLeastReach = 0.9;

double Element(const TensorView& view, int64_t b, int64_t h, int64_t s, int64_t n) {
  std::byte element[sizeof(double)];
  view.CopyElement(b, h, s, n, element);
  return LoadElement(element, view.dtype, 0);
}

}  // namespace

bool HasEstimates(const Problem& p) {
  return Variants().front().used(p) && !p.mask && !p.bias && !p.has_window() && p.softcap == 0 &&
         !p.dropout && !p.q8_0 && p.past_length == 0 && p.effective_scale() >= 0;
}

void EstimateFit::Merge(const EstimateFit& other) {
  rows += other.rows;
  squared_norms += other.squared_norms;
  reachable_weights += other.reachable_weights;
}

EstimateFit MeasureRow(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i,
                       absl::Span<double> weights) {
  const int64_t kv_head = h / (p.query_heads / p.kv_heads);
  double squares = 0;
  for (int64_t j = 0; j < p.key_length; ++j) {
    if (weights[j] == 0) continue;
    double norm = 0;
    for (int64_t d = 0; d < p.head_size; ++d) {
      const double sum =
          Element(a.inputs[Role::kQ], b, h, i, d) + Element(a.inputs[Role::kK], b, kv_head, j, d);
      norm += sum * sum;
    }
    squares += weights[j] * p.effective_scale() * norm;
  }
  const int64_t reached = std::min(kLshKeys, p.key_length);
  std::nth_element(weights.begin(), weights.begin() + (reached - 1), weights.end(),
                   std::greater<>());
  const double reachable = std::accumulate(weights.begin(), weights.begin() + reached, 0.0);
  return {.rows = 1, .squared_norms = squares, .reachable_weights = reachable};
}

std::vector<std::string> Explain(const Problem& p, const EstimateFit& fit) {
  const double norm = fit.squared_norms / static_cast<double>(fit.rows);
  const double deviation = std::sqrt(std::expm1(norm) / static_cast<double>(kFavorFeatures));
  const double reach = fit.reachable_weights / static_cast<double>(fit.rows);
  std::vector<std::string> sentences = {absl::StrFormat(
      "FAVOR+ %s: scale * |q + k|^2 is %.3g in the mean by weight, so with %d features the "
      "relative "
      "standard deviation of a weight is up to %.2g",
      deviation <= kMostDeviation ? "may estimate this call" : "is useless for these inputs", norm,
      kFavorFeatures, deviation)};
  if (p.key_length <= kLshKeys) {
    sentences.push_back(absl::StrFormat(
        "LSH saves nothing: 4 rounds with chunks of 64 meet %d keys, and there are %d", kLshKeys,
        p.key_length));
    return sentences;
  }
  sentences.push_back(absl::StrFormat(
      "LSH %s: 4 rounds with chunks of 64 meet at most %d of the %d keys of a row, and the %d "
      "largest weights have %.3g of the sum",
      reach < kLeastReach ? "is useless for these inputs"
                          : "may estimate this call, if its queries are its keys",
      kLshKeys, p.key_length, kLshKeys, reach));
  return sentences;
}

}  // namespace rapt
