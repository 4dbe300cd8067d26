#include "attention/rotary/angles.h"

#include <algorithm>
#include <cmath>

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

}  // namespace

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
  for (int64_t t = 0; t < source.pairs; ++t) {
    frequencies_[t] =
        std::pow(*source.theta, -static_cast<double>(t) / static_cast<double>(source.pairs));
  }
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
  for (int64_t t = 0; t < source_.pairs; ++t) {
    const double angle = static_cast<double>(position) * frequencies_[t];
    StoreElement(out, real_, t, std::cos(angle));
    StoreElement(out + row_bytes_, real_, t, std::sin(angle));
  }
}

}  // namespace rapt
