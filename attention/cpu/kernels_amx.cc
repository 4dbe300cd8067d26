// Kernels for AVX-512 and the tiles of AMX-BF16, whose instruction multiplies bf16 numbers and sums
// in fp32: attention in tiles for every type, and everything else as with AVX-512.
#define RAPT_VECTOR_BYTES 64
#define RAPT_MICRO_ROWS 6
#define RAPT_MICRO_VECTORS 4
#include <immintrin.h>

#include "attention/cpu/kernels.inc"
// After the kernels, which they use.
#include "attention/cpu/avx512_fallback.inc"
#include "attention/cpu/tile_flash.inc"
#include "attention/cpu/tile_unit.h"

namespace rapt::cpu {
namespace {

constexpr int kFirstA = 4;
constexpr int kFirstB = 6;

template <int kFirst, int kCount>
RAPT_INLINE void LoadTerm(const Operand& operand, int64_t depth, int term) {
  const std::byte* p = operand.tiles + depth * operand.depth_step + term * kTileBytes;
  LoadTile<kFirst>(p, kTileRowBytes);
  if constexpr (kCount == 2) LoadTile<kFirst + 1>(p + operand.step, kTileRowBytes);
}

template <int kRows, int kColumns>
RAPT_INLINE void MultiplyTerm() {
  MultiplyTiles<0, kFirstA, kFirstB>();
  if constexpr (kColumns == 2) MultiplyTiles<1, kFirstA, kFirstB + 1>();
  if constexpr (kRows == 2) MultiplyTiles<2, kFirstA + 1, kFirstB>();
  if constexpr (kRows == 2 && kColumns == 2) MultiplyTiles<3, kFirstA + 1, kFirstB + 1>();
}

// Calls body with the constants 0, 1, ... count - 1.
template <int... kN, typename Body>
RAPT_INLINE void Unroll(std::integer_sequence<int, kN...>, Body body) {
  (body(std::integral_constant<int, kN>{}), ...);
}

// C = A B, or C += A B, of kRows x kColumns tiles; strides of C in bytes.
template <const auto& kProducts, int kRows, int kColumns>
void MultiplyBlock(Operand a, Operand b, int64_t depths, bool accumulate, float* c,
                   int64_t c_stride) {
  const auto tile = [&](int row, int column) RAPT_LAMBDA_INLINE {
    return reinterpret_cast<std::byte*>(c) + row * kTileRows * c_stride + column * kTileRowBytes;
  };
  const auto each_sum = [&](auto body) RAPT_LAMBDA_INLINE {
    Unroll(std::make_integer_sequence<int, 4>(), [&](auto n) RAPT_LAMBDA_INLINE {
      if constexpr (n / 2 < kRows && n % 2 < kColumns) body(n);
    });
  };
  each_sum([&](auto n) RAPT_LAMBDA_INLINE {
    accumulate ? LoadTile<n>(tile(n / 2, n % 2), c_stride) : ZeroTile<n>();
  });
  for (int64_t depth = 0; depth < depths; ++depth) {
    Unroll(std::make_integer_sequence<int, std::decay_t<decltype(kProducts)>::count>(),
           [&](auto n) RAPT_LAMBDA_INLINE {
             constexpr Product kNow = kProducts.list[n];
             constexpr Product kBefore = kProducts.list[n == 0 ? 0 : n - 1];
             if constexpr (n == 0 || kNow.a != kBefore.a)
               LoadTerm<kFirstA, kRows>(a, depth, kNow.a);
             if constexpr (n == 0 || kNow.b != kBefore.b) {
               LoadTerm<kFirstB, kColumns>(b, depth, kNow.b);
             }
             MultiplyTerm<kRows, kColumns>();
           });
  }
  each_sum([&](auto n) RAPT_LAMBDA_INLINE { StoreTile<n>(tile(n / 2, n % 2), c_stride); });
}

// 2 x 2 tiles of sums stay in registers: four loads for four products.
struct TileUnitProducts {
  using Configuration = TileConfiguration;

  template <Element kElement>
  static constexpr bool kSuits = kElement != Element::kFloat64;

  template <const auto& kProducts>
  RAPT_INLINE static void Multiply(const Operand& a, const Operand& b, const TileShape& shape,
                                   bool accumulate, float* c, int64_t c_stride) {
    shape.rows > kTileRows ? MultiplyRows<kProducts, 2>(a, b, shape, accumulate, c, c_stride)
                           : MultiplyRows<kProducts, 1>(a, b, shape, accumulate, c, c_stride);
  }

 private:
  template <const auto& kProducts, int kRows>
  RAPT_INLINE static void MultiplyRows(const Operand& a, const Operand& b, const TileShape& shape,
                                       bool accumulate, float* c, int64_t c_stride) {
    const auto columns = [&](int64_t tile, auto count) RAPT_LAMBDA_INLINE {
      MultiplyBlock<kProducts, kRows, count>(
          a, {b.tiles + tile * b.step, b.step, b.depth_step}, shape.depths, accumulate,
          c + tile * kTileRowBytes / int64_t{sizeof(float)}, c_stride);
    };
    int64_t tile = 0;
    for (; tile + 2 <= shape.columns; tile += 2) columns(tile, std::integral_constant<int, 2>{});
    if (tile < shape.columns) columns(tile, std::integral_constant<int, 1>{});
  }
};

}  // namespace

extern const KernelTable kAmxKernels =
    kTableWithTiles<TileUnitProducts, FoldTiles<TileUnitProducts>>;

}  // namespace rapt::cpu
