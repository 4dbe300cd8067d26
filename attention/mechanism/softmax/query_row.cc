#include "attention/mechanism/softmax/query_row.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "attention/half.h"
#include "attention/philox.h"

namespace rapt {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

}  // namespace

QueryRow::QueryRow(const Problem& problem, const Arguments& arguments, int64_t b, int64_t h,
                   int64_t i)
    : p_(problem),
      a_(arguments),
      b_(b),
      h_(h),
      i_(i),
      kv_head_(h / problem.group_size()),
      visible_(VisibleKeys(problem, arguments.key_lengths, b, i)) {}

double QueryRow::Weigh(absl::Span<double> s, Observer observe) const {
  const int64_t t = p_.total_keys();
  for (int64_t j = 0; j < t; ++j) s[j] = Dot(j);
  observe(Step::kRaw, s);

  for (double& score : s) score *= p_.effective_scale();
  observe(Step::kScaled, s);

  if (p_.softcap > 0) {
    for (double& score : s) score = p_.softcap * std::tanh(score / p_.softcap);
  }
  observe(Step::kSoftcapped, s);

  for (int64_t j = 0; j < t; ++j) {
    s[j] = HiddenByPosition(j) || HiddenByMask(j) ? kMinusInfinity : s[j] + Bias(j);
  }
  observe(Step::kBiased, s);

  const double lse = Softmax(s);
  observe(Step::kSoftmax, s);

  if (p_.dropout) DropOut(s);
  observe(Step::kWeights, s);
  return lse;
}

void QueryRow::Output(absl::Span<const double> weights, double lse,
                      absl::Span<double> output) const {
  std::fill(output.begin(), output.end(), 0.0);
  if (lse == kMinusInfinity) return;
  for (int64_t j = visible_.begin; j < visible_.end; ++j) {
    if (HiddenByMask(j)) continue;  // A NaN in its V must not matter.
    const std::byte* v = KeyRow(a_.inputs[Role::kPastValue], a_.inputs[Role::kV], j);
    for (int64_t d = 0; d < p_.value_head_size; ++d) {
      output[d] += weights[j] * LoadElement(v, p_.dtype, d);
    }
  }
}

bool QueryRow::HiddenByPosition(int64_t j) const { return j < visible_.begin || j >= visible_.end; }

bool QueryRow::HiddenByMask(int64_t j) const {
  if (!p_.mask) return false;
  if (p_.mask->dims[3] != 1 && j >= p_.mask->dims[3]) return true;
  if (p_.mask->dtype != DType::kBool) return Bias(j) == kMinusInfinity;
  return a_.inputs[Role::kMask].Row(b_, h_, i_)[j * a_.inputs[Role::kMask].strides[3]] ==
         std::byte{0};
}

double QueryRow::Bias(int64_t j) const {
  if (!p_.mask || p_.mask->dtype == DType::kBool) return 0;
  return LoadElement(a_.inputs[Role::kMask].Row(b_, h_, i_), p_.mask->dtype,
                     j * a_.inputs[Role::kMask].strides[3]);
}

double QueryRow::Dot(int64_t j) const {
  const std::byte* q = a_.inputs[Role::kQ].Row(b_, h_, i_);
  const std::byte* k = KeyRow(a_.inputs[Role::kPastKey], a_.inputs[Role::kK], j);
  double sum = 0;
  for (int64_t d = 0; d < p_.head_size; ++d) {
    sum += LoadElement(q, p_.dtype, d) * LoadElement(k, p_.dtype, d);
  }
  return sum;
}

// Turns the scores into weights and returns their lse.
double QueryRow::Softmax(absl::Span<double> s) const {
  double max = kMinusInfinity;
  for (double score : s) max = score > max || std::isnan(score) ? score : max;
  if (max == kMinusInfinity) {
    std::fill(s.begin(), s.end(), 0.0);
    return kMinusInfinity;
  }
  double sum = 0;
  for (double& score : s) sum += score = std::exp(score - max);
  for (double& weight : s) weight /= sum;
  return max + std::log(sum);
}

void QueryRow::DropOut(absl::Span<double> weights) const {
  const double p = p_.dropout->probability;
  const Section place = p_.section.value_or(Section{});
  for (int64_t j = 0; j < static_cast<int64_t>(weights.size()); ++j) {
    bool keep;
    DropoutKeeps(p, p_.dropout->seed, b_, h_, place.first_query + i_, place.first_key + j, 1,
                 &keep);
    weights[j] = keep ? weights[j] / (1 - p) : 0;
  }
}

// Row j of the past's keys or values and the new ones, one after the other.
const std::byte* QueryRow::KeyRow(const TensorView& past, const TensorView& now, int64_t j) const {
  return j < p_.past_length ? past.Row(b_, kv_head_, j) : now.Row(b_, kv_head_, j - p_.past_length);
}

}  // namespace rapt
