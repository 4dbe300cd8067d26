#include "attention/rotary/rotate.h"

#include <cstring>

#include "attention/half.h"

namespace rapt {
namespace {

// The storage types, by their bits in memory and their angles' type.
struct Fp64 {
  using Bits = double;
  using Angle = double;
  static double Widen(double value) { return value; }
  static double Narrow(double value) { return value; }
};
struct Fp32 {
  using Bits = float;
  using Angle = float;
  static double Widen(float value) { return value; }
  static float Narrow(double value) { return static_cast<float>(value); }
};
struct Fp16 {
  using Bits = uint16_t;
  using Angle = float;
  static double Widen(uint16_t bits) { return HalfToDouble(bits); }
  static uint16_t Narrow(double value) { return FloatToHalf(static_cast<float>(value)); }
};
struct Bf16 {
  using Bits = uint16_t;
  using Angle = float;
  static double Widen(uint16_t bits) { return BFloat16ToDouble(bits); }
  static uint16_t Narrow(double value) { return FloatToBFloat16(static_cast<float>(value)); }
};

template <typename Type>
void Rotate(const RotaryRow& row) {
  using Bits = typename Type::Bits;
  using Angle = typename Type::Angle;
  const int64_t step = row.interleaved ? 2 : 1;
  const int64_t distance = row.interleaved ? 1 : row.pairs;
  for (int64_t t = 0; t < row.pairs; ++t) {
    const double x = Type::Widen(LoadAs<Bits>(row.from, t * step));
    const double y = Type::Widen(LoadAs<Bits>(row.from, t * step + distance));
    const double cos = LoadAs<Angle>(row.cos, t);
    const double sin = LoadAs<Angle>(row.sin, t);
    StoreAs<Bits>(row.to, t * step, Type::Narrow(x * cos - y * sin));
    StoreAs<Bits>(row.to, t * step + distance, Type::Narrow(y * cos + x * sin));
  }
  if (row.from == row.to) return;
  const auto done = 2 * row.pairs * int64_t{sizeof(Bits)};
  std::memcpy(row.to + done, row.from + done, row.size * sizeof(Bits) - done);
}

}  // namespace

void RotateRow(const RotaryRow& row) {
  switch (row.element) {
    case Element::kFloat64:
      return Rotate<Fp64>(row);
    case Element::kFloat32:
      return Rotate<Fp32>(row);
    case Element::kFloat16:
      return Rotate<Fp16>(row);
    case Element::kBFloat16:
      return Rotate<Bf16>(row);
    case Element::kBool:
      return;
  }
}

template <typename Real>
void RotateBack(const RotaryRow& row, Real* gradient) {
  const auto angle = [&row](const std::byte* angles, int64_t t) -> double {
    return row.element == Element::kFloat64 ? LoadAs<double>(angles, t) : LoadAs<float>(angles, t);
  };
  const int64_t step = row.interleaved ? 2 : 1;
  const int64_t distance = row.interleaved ? 1 : row.pairs;
  for (int64_t t = 0; t < row.pairs; ++t) {
    Real& first = gradient[t * step];
    Real& second = gradient[t * step + distance];
    const double x = first;
    const double y = second;
    const double cos = angle(row.cos, t);
    const double sin = angle(row.sin, t);
    first = static_cast<Real>(x * cos + y * sin);
    second = static_cast<Real>(y * cos - x * sin);
  }
}

template void RotateBack(const RotaryRow& row, float* gradient);
template void RotateBack(const RotaryRow& row, double* gradient);

}  // namespace rapt
