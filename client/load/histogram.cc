#include "client/load/histogram.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace rapt::load {
namespace {

constexpr int kHalfBits = 10;               // 2^10 buckets in a power of two
constexpr int64_t kExact = 2 << kHalfBits;  // below this, every value has its own bucket

size_t IndexOf(int64_t value) {
  if (value < kExact) return static_cast<size_t>(value);
  const int shift = std::bit_width(static_cast<uint64_t>(value)) - (kHalfBits + 1);
  return (static_cast<size_t>(shift) << kHalfBits) + static_cast<size_t>(value >> shift);
}

// Returns the largest value in the bucket.
int64_t UpperEnd(size_t index) {
  if (index < static_cast<size_t>(kExact)) return static_cast<int64_t>(index);
  const int shift = static_cast<int>(index >> kHalfBits) - 1;
  const int64_t leading = static_cast<int64_t>(index) - (static_cast<int64_t>(shift) << kHalfBits);
  return ((leading + 1) << shift) - 1;
}

}  // namespace

void Histogram::Record(int64_t value, int64_t times) {
  if (times <= 0) return;
  value = std::clamp<int64_t>(value, 0, kMaxValue);
  const size_t index = IndexOf(value);
  if (index >= counts_.size()) counts_.resize(index + 1);
  counts_[index] += times;
  min_ = count_ == 0 ? value : std::min(min_, value);
  max_ = std::max(max_, value);
  count_ += times;
  sum_ += static_cast<double>(value) * static_cast<double>(times);
}

void Histogram::Add(const Histogram& other) {
  if (other.count_ == 0) return;
  if (other.counts_.size() > counts_.size()) counts_.resize(other.counts_.size());
  for (size_t i = 0; i < other.counts_.size(); ++i) counts_[i] += other.counts_[i];
  min_ = count_ == 0 ? other.min_ : std::min(min_, other.min_);
  max_ = std::max(max_, other.max_);
  count_ += other.count_;
  sum_ += other.sum_;
}

void Histogram::Clear() { *this = Histogram(); }

double Histogram::mean() const { return count_ == 0 ? 0 : sum_ / static_cast<double>(count_); }

int64_t Histogram::ValueAt(double quantile) const {
  const double exact_rank = std::clamp(quantile, 0.0, 1.0) * static_cast<double>(count_);
  // The product may be slightly too large: 0.07 * 100 > 7.
  const auto rank = std::max<int64_t>(1, static_cast<int64_t>(std::ceil(exact_rank - 1e-6)));
  int64_t seen = 0;
  for (size_t i = 0; i < counts_.size(); ++i) {
    seen += counts_[i];
    if (seen >= rank) return std::clamp(UpperEnd(i), min_, max_);
  }
  return max_;
}

std::vector<Histogram::Bucket> Histogram::Buckets() const {
  std::vector<Bucket> buckets;
  for (size_t i = 0; i < counts_.size(); ++i) {
    if (counts_[i] > 0) buckets.push_back({std::clamp(UpperEnd(i), min_, max_), counts_[i]});
  }
  return buckets;
}

}  // namespace rapt::load
