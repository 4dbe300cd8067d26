#include "attention/mechanism/entmax/entmax.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/half.h"

namespace rapt {
namespace {

constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The norm is convex and its Newton steps come from one side, so that few are needed.
constexpr int kMaxSteps = 200;

// 1 + (alpha - 1) (s - sigma) and the weight, its power, for sigma = max + excess.
struct Powers {
  double alpha, max, excess;

  double Base(double s) const { return 1 + (alpha - 1) * (s - max - excess); }
  double Weight(double s) const {
    const double x = (alpha - 1) * (s - max - excess);
    return x > -1 ? std::exp(std::log1p(x) / (alpha - 1)) : 0;
  }
};

// Newton's step for the norm of the bases: (sum of P)^(alpha - 1) = 1.
double Step(const Powers& powers, absl::Span<const double> scores) {
  double sum = 0, slope = 0;
  for (double s : scores) {
    const double weight = powers.Weight(s);
    if (weight == 0) continue;
    sum += weight;
    slope += weight / powers.Base(s);
  }
  const double rest = powers.alpha - 1;
  return -std::expm1(-rest * std::log(sum)) / rest * sum / slope;
}

}  // namespace

double AlphaOf(const Problem& p, const Arguments& a, int64_t h) {
  switch (p.normalizer) {
    case Normalizer::kSoftmax:
      return 1;
    case Normalizer::kSparsemax:
      return 2;
    case Normalizer::kEntmax15:
      return 1.5;
    case Normalizer::kEntmax:
      break;
  }
  if (p.alpha) return *p.alpha;
  // Shared memory may have changed since it was checked; NaN becomes 1.
  const double alpha = LoadElement(a.inputs[Role::kHeadAlpha].Row(h, 0, 0), *p.head_alpha, 0);
  return alpha >= 1 ? std::min(alpha, 2.0) : 1;
}

bool Entmax(double alpha, absl::Span<double> scores) {
  double max = -kInfinity;
  for (double s : scores) max = s > max || std::isnan(s) ? s : max;
  if (max == -kInfinity) {
    std::fill(scores.begin(), scores.end(), 0.0);
    return false;
  }
  if (!(max < kInfinity)) {
    std::fill(scores.begin(), scores.end(), std::numeric_limits<double>::quiet_NaN());
    return true;
  }
  Powers powers = {alpha, max, 0};  // the largest weight is at most 1
  for (int n = 0; n < kMaxSteps; ++n) {
    const double next = powers.excess + Step(powers, scores);
    if (!(next > powers.excess)) break;
    powers.excess = next;
  }
  double sum = 0;
  for (double& s : scores) sum += s = powers.Weight(s);
  for (double& weight : scores) weight /= sum;
  return true;
}

}  // namespace rapt
