#include "attention/q8_0.h"

#include <algorithm>
#include <bit>
#include <cstring>

#include "attention/half.h"
#include "base/check.h"

namespace rapt::q8_0 {
namespace {

constexpr float kMost = 127;
constexpr uint16_t kHalfNan = 0x7E00;

void LoadNumbers(const std::byte* numbers, DType dtype, int64_t count, float* to) {
  switch (dtype) {
    case DType::kFloat32:
      std::memcpy(to, numbers, static_cast<size_t>(count) * sizeof(float));
      return;
    case DType::kFloat16:
      for (int64_t n = 0; n < count; ++n) to[n] = HalfToFloat(LoadAs<uint16_t>(numbers, n));
      return;
    case DType::kBFloat16:
      for (int64_t n = 0; n < count; ++n) {
        to[n] = std::bit_cast<float>(static_cast<uint32_t>(LoadAs<uint16_t>(numbers, n)) << 16);
      }
      return;
    default:
      RAPT_CHECK(false, "only FP32, FP16 and BF16 are stored in 8 bits");
  }
}

// Returns max |x|; NaN and infinities are the largest.
float LargestOf(const float* numbers, int64_t count) {
  uint32_t largest = 0;
  for (int64_t n = 0; n < count; ++n) {
    largest = std::max(largest, std::bit_cast<uint32_t>(numbers[n]) & 0x7FFFFFFF);
  }
  return std::bit_cast<float>(largest);
}

// Returns the least FP16 number s with 127 s >= largest; NaN if there is none.
uint16_t ScaleOf(float largest) {
  if (!(largest <= kMost * 65504.0F)) return kHalfNan;
  const uint16_t nearest = FloatToHalf(largest / kMost);
  // Exact: a product of 11 and 7 bits.
  return HalfToFloat(nearest) * kMost < largest ? nearest + 1 : nearest;
}

void StoreBlock(const float* numbers, int64_t count, std::byte* block) {
  const uint16_t scale = ScaleOf(LargestOf(numbers, count));
  StoreAs(block, 0, scale);
  auto* const stored = reinterpret_cast<int8_t*>(block + kScaleBytes);
  if (scale == 0 || scale == kHalfNan) {
    std::memset(stored, 0, static_cast<size_t>(count));
    return;
  }
  const float divisor = HalfToFloat(scale);
  for (int64_t n = 0; n < count; ++n) {
    // The bits of 1.5 * 2^23 + x, rounded to nearest even, end with those of the integer.
    const float shifted = numbers[n] / divisor + 12582912.0F;
    stored[n] = static_cast<int8_t>(std::bit_cast<uint32_t>(shifted));
  }
}

}  // namespace

void StoreRow(const std::byte* numbers, DType dtype, int64_t size, std::byte* row) {
  float block[kBlock];
  for (int64_t n = 0; n < size; n += kBlock, row += kBlockBytes) {
    const int64_t count = std::min(kBlock, size - n);
    LoadNumbers(numbers + n * SizeOf(dtype), dtype, count, block);
    StoreBlock(block, count, row);
  }
}

float LoadNumber(const std::byte* row, int64_t n) {
  const std::byte* const block = row + n / kBlock * kBlockBytes;
  const float scale = HalfToFloat(LoadAs<uint16_t>(block, 0));
  return scale * static_cast<float>(LoadAs<int8_t>(block + kScaleBytes, n % kBlock));
}

}  // namespace rapt::q8_0
