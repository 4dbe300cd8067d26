// Scalar conversions between the storage types and double, rounding to nearest even. Written for
// clarity, not speed; the kernels have their own.
#ifndef RAPT_ATTENTION_HALF_H_
#define RAPT_ATTENTION_HALF_H_

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "attention/tensor_view.h"

namespace rapt {

double HalfToDouble(uint16_t bits);
double BFloat16ToDouble(uint16_t bits);
uint16_t DoubleToHalf(double value);
uint16_t DoubleToBFloat16(double value);

// The same results for floats, but much faster.
uint16_t FloatToHalf(float value);
uint16_t FloatToBFloat16(float value);
inline float HalfToFloat(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t magnitude = bits & 0x7FFF;
  if (magnitude >= 0x7C00) {  // infinity or NaN
    return std::bit_cast<float>(sign | 0x7F800000 | (magnitude & 0x3FF) << 13);
  }
  // Shifted into the bits of a float, the number is too small by 2^112.
  const float value = std::bit_cast<float>(magnitude << 13) * 0x1p112F;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

// Loads or stores element `index` of unaligned storage of T.
template <typename T>
T LoadAs(const std::byte* data, int64_t index) {
  T value;
  std::memcpy(&value, data + index * int64_t{sizeof(T)}, sizeof(T));
  return value;
}
template <typename T>
void StoreAs(std::byte* data, int64_t index, T value) {
  std::memcpy(data + index * int64_t{sizeof(T)}, &value, sizeof(T));
}

// Loads or stores element `index` of unaligned storage of a float type.
double LoadElement(const std::byte* data, DType dtype, int64_t index);
void StoreElement(std::byte* data, DType dtype, int64_t index, double value);

}  // namespace rapt

#endif  // RAPT_ATTENTION_HALF_H_
