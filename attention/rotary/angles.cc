#include "attention/rotary/angles.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "attention/half.h"
#include "base/round_up.h"

namespace rapt {
namespace {

DType RealOf(DType element) {
  return element == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
}

int64_t RowBytes(int64_t pairs, DType element) { return pairs * SizeOf(RealOf(element)); }

// The bytes of all slots, after which the frequencies begin.
int64_t SlotBytes(int64_t pairs, DType element, int64_t slots) {
  return RoundUp(2 * RowBytes(pairs, element) * slots, sizeof(double));
}

constexpr double kTurn = 2 * std::numbers::pi;

// The turns of a pair within the length of training, or the index of a pair, at which nothing of
// its frequency is kept, and at which all is.
struct Slope {
  double none = 0;
  double all = 0;

  double KeptAt(double x) const { return std::clamp((x - none) / (all - none), 0.0, 1.0); }
};

// By index, as Transformers computes it.
Slope SlopeOfYarn(double theta, const RopeScaling& scaling, double pairs) {
  const auto pair_of = [&](double turns) {
    return pairs * (std::log(scaling.original_length / kTurn) - std::log(turns)) / std::log(theta);
  };
  Slope slope{.none = pair_of(scaling.slow), .all = pair_of(scaling.fast)};
  if (scaling.truncate) slope = {.none = std::ceil(slope.none), .all = std::floor(slope.all)};
  slope = {.none = std::min(slope.none, 2 * pairs - 1), .all = std::max(slope.all, 0.0)};
  if (slope.none == slope.all) slope.none += 0.001;
  return slope;
}

}  // namespace

void RotaryFrequencies(double theta, const std::optional<RopeScaling>& scaling,
                       absl::Span<double> out) {
  const auto pairs = static_cast<double>(out.size());
  for (size_t t = 0; t < out.size(); ++t) out[t] = std::pow(theta, -static_cast<double>(t) / pairs);
  if (!scaling) return;
  const bool is_linear = scaling->type == RopeScaling::Type::kLinear;
  const bool is_yarn = scaling->type == RopeScaling::Type::kYarn;
  const Slope slope = is_yarn ? SlopeOfYarn(theta, *scaling, pairs)
                              : Slope{.none = scaling->slow, .all = scaling->fast};
  for (size_t t = 0; t < out.size(); ++t) {
    const double x = is_yarn ? static_cast<double>(t) : scaling->original_length * out[t] / kTurn;
    const double kept = is_linear ? 0 : slope.KeptAt(x);
    out[t] *= kept + (1 - kept) / scaling->factor;
  }
}

int64_t Angles::Bytes(int64_t pairs, DType element, int64_t slots) {
  return SlotBytes(pairs, element, slots) + (pairs + slots) * int64_t{sizeof(double)};
}

Angles::Angles(const AngleSource& source, DType element, int64_t slots, std::byte* memory)
    : source_(source),
      real_(RealOf(element)),
      row_bytes_(RowBytes(source.pairs, element)),
      memory_(memory),
      frequencies_(reinterpret_cast<double*>(memory + SlotBytes(source.pairs, element, slots))),
      positions_(reinterpret_cast<int64_t*>(frequencies_ + source.pairs)) {
  if (!source.theta) return;
  RotaryFrequencies(*source.theta, source.scaling,
                    {frequencies_, static_cast<size_t>(source.pairs)});
}

void Angles::Set(int64_t slot, int64_t b, int64_t s, int64_t position) {
  if (!source_.by_token && slot < filled_ && positions_[slot] == position) return;
  positions_[slot] = position;
  filled_ = std::max(filled_, slot + 1);
  std::byte* const out = memory_ + slot * bytes();
  if (source_.theta) return Compute(position, out);
  Load(source_.cos, b, source_.by_token ? s : position, out);
  Load(source_.sin, b, source_.by_token ? s : position, out + row_bytes_);
}

void Angles::Load(const TensorView& cache, int64_t b, int64_t s, std::byte* out) const {
  const std::byte* row = source_.by_token ? cache.Row(b, s, 0) : cache.Row(s, 0, 0);
  const int64_t step = source_.by_token ? cache.strides[2] : cache.strides[1];
  for (int64_t t = 0; t < source_.pairs; ++t) {
    StoreElement(out, real_, t, LoadElement(row, cache.dtype, t * step));
  }
}

void Angles::Compute(int64_t position, std::byte* out) const {
  const double size = source_.scaling ? source_.scaling->attention_factor : 1;
  for (int64_t t = 0; t < source_.pairs; ++t) {
    const double angle = static_cast<double>(position) * frequencies_[t];
    StoreElement(out, real_, t, size * std::cos(angle));
    StoreElement(out + row_bytes_, real_, t, size * std::sin(angle));
  }
}

}  // namespace rapt
