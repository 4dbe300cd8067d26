// Projections of BF16 by BF16 with AVX512-BF16: dot products of pairs, each of which takes the time
// of an FMA on AMD's processors.
#define RAPT_VECTOR_BYTES 64
#define RAPT_MICRO_ROWS 6
#define RAPT_MICRO_VECTORS 4
#include <immintrin.h>

#include "attention/cpu/projection.inc"
// After the kernels, which it uses.
#include "attention/cpu/projection_pairs.inc"

namespace rapt::cpu {
namespace {

struct DotBlocks : PairBlocks<2> {
  static constexpr bool kInPlace = true;
  // Rows may end with half a pair.
  static bool TakesInPlace(const ProjectionTask& task) { return task.depth % 2 == 0; }

  static void Multiply(const ProjectionTask& task, const std::byte* a, int64_t a_bytes,
                       const std::byte* panel, int64_t d, int64_t depth, int64_t /*columns*/,
                       bool adds, std::byte* /*converted*/, float* c, int64_t c_stride) {
    const std::byte* const b = panel + d * kPanelColumns * SizeOf(Element::kBFloat16);
    int64_t r = 0;
    const auto multiply = [&](auto rows) RAPT_LAMBDA_INLINE {
      constexpr int kRows = decltype(rows)::value;
      for (; r + kRows <= task.rows; r += kRows) {
        MultiplyRows<kRows>(a + r * a_bytes, a_bytes, b, depth, adds, c + r * c_stride, c_stride);
      }
    };
    multiply(std::integral_constant<int, RAPT_MICRO_ROWS>());
    multiply(std::integral_constant<int, 2>());
    multiply(std::integral_constant<int, 1>());
  }

 private:
  static constexpr int kVectors = RAPT_MICRO_VECTORS;

  template <int kRows>
  static void MultiplyRows(const std::byte* a, int64_t a_bytes, const std::byte* b, int64_t depth,
                           bool adds, float* c, int64_t c_stride) {
    constexpr int kLanes = Simd<float>::kLanes;
    constexpr int64_t kPairBytes = 4;
    Vec<float> sums[kRows][kVectors];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        sums[r][v] = adds ? Load(c + r * c_stride + v * kLanes) : Vec<float>{};
      }
    }
    for (int64_t pair = 0; 2 * pair < depth; ++pair) {
      __m512i columns[kVectors];
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) {
        columns[v] = _mm512_loadu_si512(b + (pair * kPanelColumns + v * kLanes) * kPairBytes);
      }
#pragma GCC unroll 8
      for (int r = 0; r < kRows; ++r) {
        const __m512i x = _mm512_set1_epi32(LoadAs<int32_t>(a + r * a_bytes + pair * kPairBytes));
#pragma GCC unroll 4
        for (int v = 0; v < kVectors; ++v) {
          sums[r][v] =
              (Vec<float>)_mm512_dpbf16_ps((__m512)sums[r][v], (__m512bh)x, (__m512bh)columns[v]);
        }
      }
    }
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) Store(c + r * c_stride + v * kLanes, sums[r][v]);
    }
  }
};

}  // namespace

extern const ProjectionKernels kAvx512Bf16ProjectionKernels = {kPairProjection<DotBlocks>,
                                                               kFp64Projection};

}  // namespace rapt::cpu
