#include "attention/score/relative_tables.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <type_traits>

#include "attention/half.h"

namespace rapt {
namespace {

// The n-th default slope of `heads` heads (Press et al. 2022). For a number that is not a power of
// two, the slopes of the next smaller one, then every other slope of twice that number.
double DefaultSlope(int64_t heads, int64_t h) {
  int64_t power = 1;
  while (2 * power <= heads) power *= 2;
  const auto n = static_cast<double>(power);
  const auto index = static_cast<double>(h < power ? h + 1 : 2 * (h - power) + 1);
  return std::exp2((h < power ? -8 : -4) * index / n);
}

// The bucket of a distance; see BiasTable.
int64_t BucketOf(const Problem& p, int64_t distance) {
  int64_t buckets = p.bias_table->buckets;
  int64_t first = 0;
  int64_t d = std::max<int64_t>(-distance, 0);
  if (p.is_bidirectional) {
    buckets /= 2;
    first = distance > 0 ? buckets : 0;
    d = std::abs(distance);
  }
  const int64_t exact = buckets / 2;
  if (d < exact) return first + d;
  const auto m = static_cast<double>(exact);
  const auto max_distance = static_cast<double>(p.max_distance.value_or(kDefaultMaxDistance));
  // Rounding must not move a distance that is an exact power, such as 8 of 4 * 2^k, one bucket
  // down.
  constexpr double kUp = 1 + 1e-12;
  const double step = kUp * std::log(static_cast<double>(d) / m) / std::log(max_distance / m) *
                      static_cast<double>(buckets - exact);
  return first + std::min(buckets - 1, exact + static_cast<int64_t>(step));
}

// The bias of any distance for one head.
class BiasOfHead {
 public:
  BiasOfHead(const Problem& p, const Arguments& a, int64_t b, int64_t h) : p_(p), a_(a), h_(h) {
    if (p.alibi) slope_ = DefaultSlope(p.query_heads, h);
    if (p.alibi_slopes) {
      const TensorView& slopes = a.inputs[Role::kAlibiSlopes];
      slope_ = LoadElement(slopes.Row(p.alibi_slopes->batch == 1 ? 0 : b, h, 0), slopes.dtype, 0);
    }
  }

  double operator()(int64_t distance) const {
    if (p_.bias_table) {
      const TensorView& table = a_.inputs[Role::kBiasTable];
      return LoadElement(table.Row(BucketOf(p_, distance), h_, 0), table.dtype, 0);
    }
    if (p_.relative_bias) {
      const TensorView& table = a_.inputs[Role::kRelativeBias];
      const int64_t entry = std::clamp(distance, -clip(), clip()) + clip();
      return LoadElement(table.Row(p_.relative_bias->heads == 1 ? 0 : h_, entry, 0), table.dtype,
                         0);
    }
    return -slope_ * std::abs(static_cast<double>(distance));
  }

  // Distances beyond it have the bias of this one.
  int64_t clip() const {
    if (p_.bias_table) return p_.max_distance.value_or(kDefaultMaxDistance);
    if (p_.relative_bias) return p_.relative_bias->length / 2;
    return std::numeric_limits<int64_t>::max();
  }

 private:
  const Problem& p_;
  const Arguments& a_;
  const int64_t h_;
  double slope_ = 0;
};

// A finite bias stays finite, because -inf would hide the key.
template <typename Real>
Real Narrow(double bias) {
  if (std::is_same_v<Real, double> || !std::isfinite(bias)) return static_cast<Real>(bias);
  return static_cast<Real>(std::clamp<double>(bias, std::numeric_limits<Real>::lowest(),
                                              std::numeric_limits<Real>::max()));
}

// The biases of consecutive distances from `first` on.
template <typename Real>
void FillBiases(const BiasOfHead& bias, int64_t first, absl::Span<Real> out) {
  const int64_t clip = bias.clip();
  const Real before = Narrow<Real>(bias(-clip));
  const Real after = Narrow<Real>(bias(clip));
  for (size_t n = 0; n < out.size(); ++n) {
    const int64_t distance = first + static_cast<int64_t>(n);
    out[n] = distance <= -clip ? before : distance >= clip ? after : Narrow<Real>(bias(distance));
  }
}

// The number of distances between Sq queries and T keys.
int64_t DistancesOf(const Problem& p) { return p.query_length + p.total_keys() - 1; }

bool VariesByBatch(const Problem& p) {
  return PositionVaries(p) || (p.alibi_slopes && p.alibi_slopes->batch != 1);
}

}  // namespace

template <typename Real>
RelativeTables<Real>::RelativeTables(const Problem& problem, std::byte* memory)
    : problem_(problem), memory_(reinterpret_cast<Real*>(memory)) {}

template <typename Real>
int64_t RelativeTables<Real>::Bytes(const Problem& p) {
  return (Count(p) * DistancesOf(p) + kSlack) * static_cast<int64_t>(sizeof(Real));
}

template <typename Real>
int64_t RelativeTables<Real>::Count(const Problem& p) {
  return p.query_heads * (VariesByBatch(p) ? p.batch : 1);
}

template <typename Real>
int64_t RelativeTables<Real>::TableOf(int64_t b, int64_t h) const {
  return (VariesByBatch(problem_) ? b * problem_.query_heads : 0) + h;
}

template <typename Real>
void RelativeTables<Real>::Fill(const Arguments& a, int64_t n) const {
  const int64_t b = n / problem_.query_heads;
  const int64_t h = n % problem_.query_heads;
  // The first key is the farthest before the last query.
  const int64_t first = -DiagonalKey(problem_, a.key_lengths, b, problem_.query_length - 1);
  const int64_t count = DistancesOf(problem_);
  FillBiases(BiasOfHead(problem_, a, b, h), first, absl::MakeSpan(memory_ + n * count, count));
}

template <typename Real>
const std::byte* RelativeTables<Real>::Row(int64_t b, int64_t h, int64_t i) const {
  return reinterpret_cast<const std::byte*>(memory_ + TableOf(b, h) * DistancesOf(problem_) +
                                            (problem_.query_length - 1 - i));
}

template class RelativeTables<float>;
template class RelativeTables<double>;

void RelativeRow(const Problem& p, const Arguments& a, int64_t b, int64_t h, int64_t i,
                 absl::Span<double> biases) {
  FillBiases(BiasOfHead(p, a, b, h), -DiagonalKey(p, a.key_lengths, b, i), biases);
}

int64_t RelativeEntries(const Problem& p) {
  if (p.bias_table) return p.bias_table->buckets;
  return p.relative_bias ? p.relative_bias->length : 1;
}

RelativeEntry RelativeEntryOf(const Problem& p, int64_t distance) {
  if (p.bias_table) return {BucketOf(p, distance), 1};
  if (!p.relative_bias) return {0, -std::abs(static_cast<double>(distance))};
  const int64_t clip = p.relative_bias->length / 2;
  return {std::clamp(distance, -clip, clip) + clip, 1};
}

std::byte* RelativeElement(const Problem& p, const MutableTensorView& table, int64_t b, int64_t h,
                           int64_t index) {
  if (p.bias_table) return table.Row(index, h, 0);
  if (p.relative_bias) return table.Row(p.relative_bias->heads == 1 ? 0 : h, index, 0);
  return table.Row(p.alibi_slopes->batch == 1 ? 0 : b, h, 0);
}

}  // namespace rapt
