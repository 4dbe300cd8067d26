#include "attention/half.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

namespace rapt {
namespace {

// Rounds to a 16-bit binary format with `mantissa_bits` stored bits and the given exponent range.
uint16_t RoundTo16(double value, int mantissa_bits, int max_exponent) {
  const uint16_t sign = std::signbit(value) ? 0x8000 : 0;
  const int exponent_field_max = 2 * max_exponent + 1;
  const uint16_t infinity = static_cast<uint16_t>(exponent_field_max << mantissa_bits);
  if (std::isnan(value)) return sign | infinity | static_cast<uint16_t>(1 << (mantissa_bits - 1));
  const double magnitude = std::fabs(value);
  if (std::isinf(magnitude)) return sign | infinity;
  // The spacing of the format's numbers at this magnitude; below the normal range it stays
  // constant.
  const int exponent =
      magnitude == 0 ? 1 - max_exponent : std::max(std::ilogb(magnitude), 1 - max_exponent);
  const double steps = std::nearbyint(std::ldexp(magnitude, mantissa_bits - exponent));
  // Bit patterns are ordered: a carry out of the mantissa increments the exponent.
  const int64_t field = exponent + max_exponent - 1;
  const int64_t bits = (field << mantissa_bits) + static_cast<int64_t>(steps);
  return sign | (bits >= infinity ? infinity : static_cast<uint16_t>(bits));
}

}  // namespace

double HalfToDouble(uint16_t bits) {
  const double sign = (bits & 0x8000) != 0 ? -1 : 1;
  const int exponent = (bits >> 10) & 0x1F;
  const int mantissa = bits & 0x3FF;
  if (exponent == 31) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  if (exponent == 0) return sign * std::ldexp(mantissa, -24);
  return sign * std::ldexp(mantissa + 1024, exponent - 25);
}

double BFloat16ToDouble(uint16_t bits) {
  const uint32_t wide = static_cast<uint32_t>(bits) << 16;
  float value;
  std::memcpy(&value, &wide, sizeof(value));
  return value;
}

uint16_t DoubleToHalf(double value) { return RoundTo16(value, 10, 15); }
uint16_t DoubleToBFloat16(double value) { return RoundTo16(value, 7, 127); }

uint16_t FloatToHalf(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  const uint16_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return sign | 0x7E00;
  if (magnitude >= 0x477FF000) return sign | 0x7C00;  // rounds to 65536 or more
  if (magnitude < 0x38800000) {                       // subnormal: an addition rounds it
    const float rounded = std::fabs(value) + 0.5f;
    uint32_t half_bits;
    std::memcpy(&half_bits, &rounded, sizeof(half_bits));
    return sign | static_cast<uint16_t>(half_bits - 0x3F000000);  // the bits of 0.5
  }
  const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
  return sign | static_cast<uint16_t>((rounded - (uint32_t{112} << 23)) >> 13);
}

uint16_t FloatToBFloat16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return (bits >> 16 & 0x8000) | 0x7FC0;
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

double LoadElement(const std::byte* data, DType dtype, int64_t index) {
  switch (dtype) {
    case DType::kFloat64:
      return LoadAs<double>(data, index);
    case DType::kFloat32:
      return LoadAs<float>(data, index);
    case DType::kFloat16:
      return HalfToDouble(LoadAs<uint16_t>(data, index));
    case DType::kBFloat16:
      return BFloat16ToDouble(LoadAs<uint16_t>(data, index));
    default:
      return std::numeric_limits<double>::quiet_NaN();
  }
}

void StoreElement(std::byte* data, DType dtype, int64_t index, double value) {
  switch (dtype) {
    case DType::kFloat64:
      return StoreAs<double>(data, index, value);
    case DType::kFloat32:
      return StoreAs<float>(data, index, static_cast<float>(value));
    case DType::kFloat16:
      return StoreAs<uint16_t>(data, index, DoubleToHalf(value));
    case DType::kBFloat16:
      return StoreAs<uint16_t>(data, index, DoubleToBFloat16(value));
    default:
      return;
  }
}

}  // namespace rapt
