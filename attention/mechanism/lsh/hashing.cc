#include "attention/mechanism/lsh/hashing.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "attention/half.h"
#include "attention/philox.h"

namespace rapt {
namespace {

// Numbers drawn, or products searched, at a time.
constexpr int64_t kBlock = 64;

// Norms that are smaller may have lost squares to underflow.
constexpr double kSmallestNorm = 1e-140;

// The first of the largest products, where NaN is largest.
struct Largest {
  double value = -std::numeric_limits<double>::infinity();
  int64_t bucket = 0;

  void Add(double product, int64_t of_bucket) {
    if (!(product > value) && !(std::isnan(product) && !std::isnan(value))) return;
    value = product;
    bucket = of_bucket;
  }
};

// The candidates so far. The second half of the Reformer's buckets has the products negated.
class Choice {
 public:
  Choice(const LshShape& shape, const LshRotations& rotations, const double* x)
      : shape_(shape), rotations_(rotations), x_(x) {}

  void AddColumn(int64_t column) {
    const double* const r = rotations_.columns + column * shape_.head_size;
    double product = 0;
    for (int64_t d = 0; d < shape_.head_size; ++d) product += x_[d] * r[d];
    first_half_.Add(product, column);
    if (shape_.is_reformer()) second_half_.Add(-product, shape_.columns() + column);
  }

  int32_t bucket() const {
    Largest largest = first_half_;
    largest.Add(second_half_.value, second_half_.bucket);
    return static_cast<int32_t>(largest.bucket);
  }

 private:
  const LshShape& shape_;
  const LshRotations& rotations_;
  const double* const x_;
  Largest first_half_;
  Largest second_half_;
};

// Eight maxima at a time, so that the loop vectorizes.
template <typename Real, typename Size>
Real LargestOf(const Real* products, int64_t count, Size size) {
  std::array<Real, 8> largest;
  largest.fill(-std::numeric_limits<Real>::infinity());
  int64_t c = 0;
  for (; c + 8 <= count; c += 8) {
    for (int64_t n = 0; n < 8; ++n) {
      const Real value = size(products[c + n]);
      largest[n] = value > largest[n] ? value : largest[n];
    }
  }
  for (; c < count; ++c) largest[0] = std::max(largest[0], size(products[c]));
  return *std::max_element(largest.begin(), largest.end());
}

// Columns [begin, end), outside of which none has a size within `gap` of the largest.
template <typename Real>
struct Candidates {
  int64_t begin = 0, end = 0;
  Real largest = -std::numeric_limits<Real>::infinity();
};

template <typename Real, typename Size>
Candidates<Real> FindCandidates(const Real* products, int64_t columns, Real gap, Size size) {
  Candidates<Real> found;
  for (int64_t begin = 0; begin < columns; begin += kBlock) {
    const int64_t count = std::min(kBlock, columns - begin);
    const Real largest = LargestOf(products + begin, count, size);
    if (largest < found.largest - gap) continue;
    if (largest > found.largest + gap) found.begin = begin;
    found.end = begin + count;
    found.largest = std::max(found.largest, largest);
  }
  return found;
}

// Chooses among the columns whose size is within `gap` of the largest: in float64, if there are
// several or the sign is not certain.
template <typename Real, typename Size>
int32_t ChooseColumn(const LshShape& shape, const LshRotations& rotations, const double* x,
                     const Real* products, Real gap, Size size) {
  const auto found = FindCandidates(products, shape.columns(), gap, size);
  const Real limit = found.largest - gap;
  const auto is_candidate = [&](Real product) { return size(product) >= limit; };
  const Real* const begin = products + found.begin;
  const Real* const end = products + found.end;
  if (std::count_if(begin, end, is_candidate) == 1 && (!shape.is_reformer() || limit > 0)) {
    const int64_t column = std::find_if(begin, end, is_candidate) - products;
    const bool second_half = shape.is_reformer() && products[column] < 0;
    return static_cast<int32_t>(second_half ? shape.columns() + column : column);
  }
  Choice choice(shape, rotations, x);
  for (const Real* p = begin; p < end; ++p) {
    if (is_candidate(*p)) choice.AddColumn(p - products);
  }
  return choice.bucket();
}

}  // namespace

double ReadRotations(const LshShape& shape, const Arguments& a, int64_t h, int64_t round,
                     double* columns, WorkMeter& meter) {
  const int64_t count = shape.columns();
  const int64_t size = shape.head_size;
  std::array<double, kBlock> block;
  double largest = 0;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t width = std::min(kBlock, count - begin);
    for (int64_t d = 0; d < size; ++d) {
      if (!meter.Pass(64 * width)) return 0;
      const int64_t first = (d * shape.num_hashes + round) * count + begin;
      if (!shape.rotations) {
        DrawNormals(shape.seed, static_cast<uint32_t>(h), DrawPurpose::kRotations, first,
                    absl::MakeSpan(block.data(), static_cast<size_t>(width)));
      }
      for (int64_t c = 0; c < width; ++c) {
        columns[(begin + c) * size + d] =
            shape.rotations ? LoadElement(a.inputs[kLshRotations].data, *shape.rotations,
                                          h * size * shape.num_hashes * count + first + c)
                            : block[c];
      }
    }
    for (int64_t c = begin; c < begin + width; ++c) {
      double squares = 0;
      for (int64_t d = 0; d < size; ++d) squares += columns[c * size + d] * columns[c * size + d];
      if (std::isnan(squares)) squares = std::numeric_limits<double>::infinity();
      largest = std::max(largest, squares);
    }
  }
  return std::sqrt(largest);
}

int32_t BucketOf(const LshShape& shape, const LshRotations& rotations, const double* x,
                 WorkMeter& meter) {
  Choice choice(shape, rotations, x);
  for (int64_t c = 0; c < shape.columns(); ++c) {
    if (!meter.Pass(4 * shape.head_size)) break;
    choice.AddColumn(c);
  }
  return choice.bucket();
}

template <typename Real>
int32_t BucketOf(const LshShape& shape, const LshRotations& rotations, const double* x, double norm,
                 const Real* products, WorkMeter& meter) {
  using Limits = std::numeric_limits<Real>;
  const double most = norm * rotations.largest_norm;
  if (!(most < Limits::max() / 4)) return BucketOf(shape, rotations, x, meter);
  if (norm < kSmallestNorm || rotations.largest_norm < kSmallestNorm) {
    const bool is_zero =
        std::all_of(x, x + shape.head_size, [](double value) { return value == 0; });
    return is_zero ? 0 : BucketOf(shape, rotations, x, meter);
  }
  // Twice the rounding errors of two products, of their factors and of float64, with a margin.
  const auto size = static_cast<double>(shape.head_size);
  const double gap = 4 * ((size + 4) * Limits::epsilon() * most +
                          size * double{Limits::min()} * (1 + norm + rotations.largest_norm));
  if (!meter.Pass(shape.columns())) return 0;
  const auto rounded_gap = static_cast<Real>(gap);
  if (!shape.is_reformer()) {
    return ChooseColumn(shape, rotations, x, products, rounded_gap, [](Real p) { return p; });
  }
  return ChooseColumn(shape, rotations, x, products, rounded_gap,
                      [](Real p) { return std::fabs(p); });
}

template int32_t BucketOf(const LshShape&, const LshRotations&, const double*, double, const float*,
                          WorkMeter&);
template int32_t BucketOf(const LshShape&, const LshRotations&, const double*, double,
                          const double*, WorkMeter&);

void SortByBucket(const LshShape& shape, const int32_t* buckets, int32_t* ends, int32_t* order,
                  WorkMeter& meter) {
  constexpr int64_t kWork = 8;
  for (int64_t n = 0; n <= shape.buckets && meter.Pass(1); ++n) ends[n] = 0;
  for (int64_t p = 0; p < shape.length && meter.Pass(kWork); ++p) ++ends[buckets[p]];
  for (int64_t n = 1; n <= shape.buckets && meter.Pass(1); ++n) ends[n] += ends[n - 1];
  for (int64_t p = shape.length; p-- > 0 && meter.Pass(kWork);) {
    order[--ends[buckets[p]]] = static_cast<int32_t>(p);
  }
}

}  // namespace rapt
