#include "bench/random_tensor.h"

#include <algorithm>
#include <cstring>
#include <random>

#include "attention/half.h"

namespace rapt::bench {
namespace {

constexpr int64_t kBlockElements = 4099;      // Prime: rows differ.
constexpr float kTwoThirdsQuantile = -0.43F;  // Of the normal distribution, from above.

}  // namespace

// Repeats one block of numbers: generating each number would take longer than the benchmark.
void FillWithRandom(DType dtype, absl::Span<std::byte> bytes) {
  std::byte block[kBlockElements * sizeof(double)];
  std::mt19937 random(1);
  std::normal_distribution<float> normal;
  for (int64_t n = 0; n < kBlockElements; ++n) {
    const float value = normal(random);
    if (dtype == DType::kBool) {
      block[n] = std::byte{value > kTwoThirdsQuantile};
    } else {
      StoreElement(block, dtype, n, value);
    }
  }
  const auto block_bytes = static_cast<size_t>(kBlockElements * SizeOf(dtype));
  for (size_t at = 0; at < bytes.size(); at += block_bytes) {
    std::memcpy(bytes.data() + at, block, std::min(block_bytes, bytes.size() - at));
  }
}

RandomTensor::RandomTensor(DType dtype, const std::array<int64_t, 4>& dims)
    : dtype_(dtype),
      dims_(dims),
      bytes_(static_cast<size_t>(dims[0] * dims[1] * dims[2] * dims[3] * SizeOf(dtype))) {
  FillWithRandom(dtype, bytes_.span());
}

}  // namespace rapt::bench
