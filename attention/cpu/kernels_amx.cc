// Kernels for AVX-512 and the tiles of AMX-BF16.
//
// A tile instruction multiplies bf16 numbers and sums in fp32. An fp16 number is the sum of two
// bf16 numbers, an fp32 number of three, so a product of two numbers is a sum of products of their
// terms: four for fp16, and for fp32 six, because the three smallest are below fp32 rounding.
//
// The loop is Flash's, in tiles: Q, K, V and P are packed as terms in bf16, pairs of neighbors in
// depth in one dword; S and O are fp32. Per block of 128 keys, 32 rows at a time, 2 x 2
// tiles of sums stay in registers: four loads for four products. P = 2^((S - m) c), where m is a
// maximum that only moves when it has grown by 2^8, so that O is seldom rescaled.
//
// Tiles flush subnormals, and Inf and NaN cannot be split into terms. A task that meets a number
// close to or beyond the limits of fp32 starts over with the AVX-512 kernel.
#define RAPT_VECTOR_BYTES 64
#define RAPT_MICRO_ROWS 6
#define RAPT_MICRO_VECTORS 4
#include <immintrin.h>

#include "attention/cpu/flash.inc"
// After the kernels, which it uses.
#include "attention/cpu/avx512_fallback.inc"
#include "attention/cpu/tile_unit.h"

namespace rapt::cpu {
namespace {

// Elements of D, or keys, in a row of a tile of A.
constexpr int64_t kDepth = 32;
// Query rows of one block of sums.
constexpr int64_t kTileRowBlock = 2 * kTileRows;
constexpr int64_t kMostTileRowBlocks = kMostRowBlocks * kRowBlock / kTileRowBlock;

// Tiles are used only for smaller numbers, whose scores are finite for any head size.
constexpr float kTooLarge = 0x1p32f;
// O is not rescaled until a row's maximum has grown by more than this, in powers of two.
constexpr float kSlack = 8;
constexpr float kLog2E = 1.44269504088896341f;

// A term of A and the term of B that it is multiplied by; 0 is the largest. Consecutive products
// share an operand.
struct Product {
  int a, b;
};

template <int kCount>
struct Products {
  static constexpr int count = kCount;
  Product list[kCount];
};

constexpr Products<1> kOneTerm = {{{0, 0}}};
constexpr Products<3> kTwoTerms = {{{1, 0}, {0, 0}, {0, 1}}};
constexpr Products<4> kTwoTermsExact = {{{1, 0}, {0, 0}, {0, 1}, {1, 1}}};
constexpr Products<6> kThreeTerms = {{{2, 0}, {1, 0}, {1, 1}, {0, 1}, {0, 0}, {0, 2}}};

// How each type is computed by tiles. The last column is the speed of a prototype on Sapphire
// Rapids relative to PyTorch; FMA kernels reach 1.4 to 1.6.
template <Element>
struct Terms;

template <>
struct Terms<Element::kBFloat16> {  // 2.2 to 2.9
  static constexpr int kCount = 1;
  static constexpr int kExpDegree = 3;
  static constexpr auto& kScores = kOneTerm;
  static constexpr auto& kOutput = kOneTerm;
};

template <>
struct Terms<Element::kFloat16> {  // 2.2 to 3.9
  static constexpr int kCount = 2;
  static constexpr int kExpDegree = 4;
  static constexpr auto& kScores = kTwoTermsExact;
  static constexpr auto& kOutput = kTwoTerms;
};

template <>
struct Terms<Element::kFloat32> {  // 1.7 to 2.5
  static constexpr int kCount = 3;
  static constexpr int kExpDegree = 5;
  static constexpr auto& kScores = kThreeTerms;
  static constexpr auto& kOutput = kThreeTerms;
};

// ---- Sums of tiles ------------------------------------------------------------------------------

// Packed terms: `step` is the distance in bytes between row or column blocks, `depth_step` that
// between depth blocks; the terms of a block are adjacent.
struct Operand {
  const std::byte* tiles;
  int64_t step;
  int64_t depth_step;
};

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

// ---- Terms --------------------------------------------------------------------------------------

// The upper half of each lane is a bf16 number.
RAPT_INLINE __m512i Upper() { return _mm512_set1_epi32(static_cast<int>(0xFFFF0000)); }

RAPT_INLINE __m512i Truncate(__m512i bits) { return _mm512_and_si512(bits, Upper()); }

// Rounds to the nearest bf16 number, ties away from zero. The result is in the upper half; the
// lower half is undefined.
RAPT_INLINE __m512i RoundUpper(__m512i bits) {
  return _mm512_add_epi32(bits, _mm512_set1_epi32(0x8000));
}

// The upper halves of `low` and `high` side by side.
RAPT_INLINE __m512i Pair(__m512i low, __m512i high) {
  constexpr int kOrAnd = 0xF8;  // a | (b & c)
  return _mm512_ternarylogic_epi32(_mm512_srli_epi32(low, 16), high, Upper(), kOrAnd);
}

// Returns x minus its first term; exact.
RAPT_INLINE __m512i Rest(__m512i x, __m512i term) {
  return _mm512_castps_si512(
      _mm512_sub_ps(_mm512_castsi512_ps(x), _mm512_castsi512_ps(Truncate(term))));
}

// Stores the terms of two vectors as pairs, tile by tile. All but the last term are rounded to
// nearest, or truncated: for a positive number the sum of the terms is the same.
template <int kTerms, bool kNearest>
RAPT_INLINE void StoreTerms(__m512i low, __m512i high, std::byte* out) {
#pragma GCC unroll 3
  for (int term = 0; term < kTerms; ++term) {
    const bool round = kNearest && term + 1 < kTerms;
    const __m512i a = round ? RoundUpper(low) : low;
    const __m512i b = round ? RoundUpper(high) : high;
    _mm512_store_si512(out + term * kTileBytes, Pair(a, b));
    if (term + 1 == kTerms) break;
    low = Rest(low, a);
    high = Rest(high, b);
  }
}

// A mask of the first `count` lanes.
RAPT_INLINE __mmask16 Lanes16(int64_t count) {
  return count >= 16 ? 0xFFFF : count <= 0 ? 0 : static_cast<__mmask16>((1 << count) - 1);
}

RAPT_INLINE __mmask32 Lanes32(int64_t count) {
  return count >= 32 ? ~__mmask32{0} : count <= 0 ? 0 : (__mmask32{1} << count) - 1;
}

// Loads elements [n, n + 16) of a row as fp32. Elements from `count` on are 0 and are not read.
template <Element kElement>
RAPT_INLINE __m512i LoadElements(const std::byte* row, int64_t n, int64_t count) {
  const __mmask16 lanes = Lanes16(count - n);
  const std::byte* p = row + n * SizeOf(kElement);
  if constexpr (kElement == Element::kFloat32) {
    return _mm512_maskz_loadu_epi32(lanes, p);
  } else if constexpr (kElement == Element::kFloat16) {
    return _mm512_castps_si512(_mm512_maskz_cvtph_ps(0xFFFF, _mm256_maskz_loadu_epi16(lanes, p)));
  } else {
    return _mm512_slli_epi32(
        _mm512_maskz_cvtepu16_epi32(0xFFFF, _mm256_maskz_loadu_epi16(lanes, p)), 16);
  }
}

// Tracks the largest magnitude.
class Largest {
 public:
  RAPT_INLINE void See(__m512i bits) {
    bits_ = _mm512_max_epu32(bits_, _mm512_and_si512(bits, _mm512_set1_epi32(0x7FFFFFFF)));
  }

  // Two bf16 numbers a lane.
  RAPT_INLINE void SeePairs(__m512i pairs) {
    const __m512i magnitudes = _mm512_and_si512(pairs, _mm512_set1_epi32(0x7FFF7FFF));
    pairs_ = _mm512_max_epu16(pairs_, magnitudes);
  }

  RAPT_INLINE bool TooLarge() const {
    const auto limit = BitCast<uint32_t>(kTooLarge);
    const __m512i limits = _mm512_set1_epi32(static_cast<int>(limit));
    const __m512i pair_limits = _mm512_set1_epi16(static_cast<short>(limit >> 16));
    return (_mm512_cmpge_epu32_mask(bits_, limits) |
            _mm512_cmpge_epu16_mask(pairs_, pair_limits)) != 0;
  }

 private:
  __m512i bits_ = _mm512_setzero_si512();
  __m512i pairs_ = _mm512_setzero_si512();
};

// Stores elements [n, n + 32) of a row of `count` as a tile row of each term. Any pairing of
// elements is correct if Q and K agree: bf16 pairs are adjacent elements, others are n and n + 16.
template <Element kElement>
RAPT_INLINE void StoreRowTerms(const std::byte* row, int64_t n, int64_t count, std::byte* out,
                               Largest& largest) {
  if constexpr (kElement == Element::kBFloat16) {
    const __m512i pairs = _mm512_maskz_loadu_epi16(Lanes32(count - n), row + n * 2);
    largest.SeePairs(pairs);
    _mm512_store_si512(out, pairs);
  } else {
    const __m512i low = LoadElements<kElement>(row, n, count);
    const __m512i high = LoadElements<kElement>(row, n + 16, count);
    largest.See(low);
    largest.See(high);
    StoreTerms<Terms<kElement>::kCount, /*kNearest=*/true>(low, high, out);
  }
}

// Exchanges rows and columns of a tile of dwords: blocks of 4 x 4 by loads, within them by
// shuffles.
RAPT_INLINE void TransposeTile(std::byte* tile) {
  __m512i out[16];
#pragma GCC unroll 4
  for (int block = 0; block < 4; ++block) {
    __m512i rows[4];
#pragma GCC unroll 4
    for (int r = 0; r < 4; ++r) {
      const auto part = [&](int lane) RAPT_LAMBDA_INLINE {
        return _mm_load_si128(
            reinterpret_cast<const __m128i*>(tile + (4 * lane + r) * kTileRowBytes + block * 16));
      };
      rows[r] = _mm512_castsi128_si512(part(0));
      rows[r] = _mm512_inserti32x4(rows[r], part(1), 1);
      rows[r] = _mm512_inserti32x4(rows[r], part(2), 2);
      rows[r] = _mm512_inserti32x4(rows[r], part(3), 3);
    }
    const __m512i a = _mm512_unpacklo_epi32(rows[0], rows[1]);
    const __m512i b = _mm512_unpackhi_epi32(rows[0], rows[1]);
    const __m512i c = _mm512_unpacklo_epi32(rows[2], rows[3]);
    const __m512i d = _mm512_unpackhi_epi32(rows[2], rows[3]);
    out[4 * block] = _mm512_unpacklo_epi64(a, c);
    out[4 * block + 1] = _mm512_unpackhi_epi64(a, c);
    out[4 * block + 2] = _mm512_unpacklo_epi64(b, d);
    out[4 * block + 3] = _mm512_unpackhi_epi64(b, d);
  }
#pragma GCC unroll 16
  for (int r = 0; r < 16; ++r) _mm512_store_si512(tile + r * kTileRowBytes, out[r]);
}

// ---- Exponentials -------------------------------------------------------------------------------

// 2^x for x <= kSlack, 0 for -inf, NaN for NaN. Relative error below 8.6e-5, 3.0e-6 and 1.5e-7 for
// the degrees 3 to 5; exact for x = 0. The polynomials are minimax for 2^r on [0, 1), with 1 at 0.
template <int kDegree>
RAPT_INLINE __m512 Exp2(__m512 x) {
  constexpr float kCoefficients[3][5] = {
      {0x1.63e658p-1f, 0x1.d2378ap-3f, 0x1.3baaa6p-4f},
      {0x1.62d6c6p-1f, 0x1.ee2450p-3f, 0x1.abf86ap-5f, 0x1.b7f72ep-7f},
      {0x1.62e4bap-1f, 0x1.ebdb56p-3f, 0x1.c91ce6p-5f, 0x1.277856p-7f, 0x1.e974f6p-10f}};
  constexpr int kFraction = 0x09;  // x - floor(x), no exceptions
  const __m512 r = _mm512_maskz_reduce_ps(0xFFFF, x, kFraction);
  const float* coefficients = kCoefficients[kDegree - 3];
  __m512 poly = _mm512_set1_ps(coefficients[kDegree - 1]);
#pragma GCC unroll 4
  for (int k = kDegree - 2; k >= 0; --k) {
    poly = _mm512_fmadd_ps(poly, r, _mm512_set1_ps(coefficients[k]));
  }
  poly = _mm512_fmadd_ps(poly, r, _mm512_set1_ps(1));
  return _mm512_maskz_scalef_ps(0xFFFF, poly, x);
}

// ---- The task -----------------------------------------------------------------------------------

// The results are valid only after kDone.
enum class TileOutcome : uint8_t { kDone, kAbandoned, kNotForTiles };

template <Element kElement>
class TileFlash : Flash<float> {
 public:
  explicit TileFlash(const FlashTask& task)
      : Flash(task),
        size_(task),
        plain_(task.score.softcap == 0 && task.rows[0].score.mask == nullptr &&
               task.rows[0].score.bias == nullptr && task.rows[0].score.relative == nullptr &&
               task.score.scale > 0),
        log2_step_(kLog2E * (plain_ ? static_cast<float>(task.score.scale) : 1.0f)) {
    std::byte* next = task.tile_scratch;
    const auto take = [&next](int64_t bytes) {
      std::byte* p = next;
      next += bytes;
      return p;
    };
    const auto take_floats = [&](int64_t bytes) { return reinterpret_cast<float*>(take(bytes)); };
    q_tiles_ = take(size_.q);
    k_tiles_ = take(size_.k);
    v_tiles_ = take(size_.v);
    p_tiles_ = take(size_.p);
    scores_ = take_floats(size_.scores);
    o_ = take_floats(size_.o);
    row_buffer_ = take(size_.row_buffer);
  }

  // The size of FlashTask::tile_scratch.
  static int64_t ScratchBytes(const FlashTask& task) { return Size(task).total(); }

  TileOutcome Run() {
    if (!PackQueries()) return TileOutcome::kNotForTiles;
    Clear();
    FormTileRowBlocks();
    for (int64_t j = t_.begin; j < t_.end; j += kTileKeyBlock) {
      const int64_t count = Min(kTileKeyBlock, t_.end - j);
      if (!PassCheckpoint(count)) return TileOutcome::kAbandoned;
      if (!PackBlock(j, count)) return TileOutcome::kNotForTiles;
      // For this block only, because code that runs at a checkpoint sets its own configuration.
      const TileConfiguration configuration;
      for (int64_t n = 0; n < block_count_; ++n) FoldRows(blocks_[n], j, count);
    }
    FinishRows();
    return TileOutcome::kDone;
  }

 private:
  static constexpr int kTerms = Terms<kElement>::kCount;
  static constexpr int64_t kTermBytes = kTerms * kTileBytes;
  static constexpr int64_t kFloatBytes = sizeof(float);
  static constexpr int64_t kLanes = Simd<float>::kLanes;

  // The layout of the scratch memory in bytes; all sizes are multiples of a vector.
  struct Size {
    explicit Size(const FlashTask& task)
        : row_tiles((task.row_count + kTileRows - 1) / kTileRows),
          depths((task.head_size + kDepth - 1) / kDepth),
          column_tiles((task.value_head_size + kLanes - 1) / kLanes),
          row_buffer(RoundUp(kDepth * SizeOf(kElement) * Max(task.head_size, task.value_head_size),
                             kVectorBytes)) {}

    const int64_t row_tiles;
    const int64_t depths;        // of D, in steps of kDepth
    const int64_t column_tiles;  // of Dv
    const int64_t q = row_tiles * depths * kTermBytes;
    const int64_t k = kTileKeyBlock / kTileRows * depths * kTermBytes;
    const int64_t v = kTileKeyBlock / kDepth * column_tiles * kTermBytes;
    const int64_t p = kTileRowBlock / kTileRows * kTileKeyBlock / kDepth * kTermBytes;
    const int64_t scores = kTileRowBlock * kTileKeyBlock * kFloatBytes;
    const int64_t o = row_tiles * column_tiles * kTileBytes;
    const int64_t row_buffer;

    int64_t total() const { return q + k + v + p + scores + o + row_buffer; }
  };

  // The depth blocks [first, end) of a key block that some row of a row block sees.
  struct Span {
    int64_t first, end;
  };

  // ---- Packing

  bool PackQueries() {
    Largest largest;
    for (int64_t r = 0; r < t_.row_count; ++r) {
      const std::byte* row = Read(t_.queries, t_.rows[r].query, t_.head_size * SizeOf(kElement));
      std::byte* out =
          q_tiles_ + r / kTileRows * size_.depths * kTermBytes + r % kTileRows * kTileRowBytes;
      for (int64_t d = 0; d < size_.depths; ++d) {
        StoreRowTerms<kElement>(row, d * kDepth, t_.head_size, out + d * kTermBytes, largest);
      }
    }
    return !largest.TooLarge();
  }

  // Keys and values [j, j + count).
  bool PackBlock(int64_t j, int64_t count) {
    Largest largest;
    for (int64_t c = 0; c < count; c += kDepth) {
      const int64_t rows = Min(kDepth, count - c);
      PackKeyRows(ReadKeys(j + c, rows, row_buffer_), rows, c / kDepth, largest);
      PackValueRows(ReadValues(j + c, rows, row_buffer_), rows, c / kDepth, largest);
    }
    return !largest.TooLarge();
  }

  // Returns row n. Beyond the last row, returns the first one, which the caller does not read.
  static const std::byte* RowOf(const Block& block, int64_t n, int64_t rows) {
    return block.data + (n < rows ? n * block.stride : 0);
  }

  // Two column tiles: K transposed.
  void PackKeyRows(const Block& keys, int64_t rows, int64_t depth_block, Largest& largest) {
    std::byte* tiles = k_tiles_ + depth_block * 2 * size_.depths * kTermBytes;
    for (int64_t n = 0; n < kDepth; ++n) {
      const int64_t count = n < rows ? t_.head_size : 0;
      std::byte* out =
          tiles + n / kTileRows * size_.depths * kTermBytes + n % kTileRows * kTileRowBytes;
      for (int64_t d = 0; d < size_.depths; ++d) {
        StoreRowTerms<kElement>(RowOf(keys, n, rows), d * kDepth, count, out + d * kTermBytes,
                                largest);
      }
    }
    for (int64_t n = 0; n < 2 * size_.depths * kTerms; ++n) TransposeTile(tiles + n * kTileBytes);
  }

  // One depth block of all column tiles. As in P, key n is next to n + 16.
  void PackValueRows(const Block& values, int64_t rows, int64_t depth_block, Largest& largest) {
    std::byte* tiles = v_tiles_ + depth_block * size_.column_tiles * kTermBytes;
    for (int64_t n = 0; n < kTileRows; ++n) {
      const int64_t low_count = n < rows ? t_.value_head_size : 0;
      const int64_t high_count = n + kTileRows < rows ? t_.value_head_size : 0;
      const std::byte* low_row = RowOf(values, n, rows);
      const std::byte* high_row = RowOf(values, n + kTileRows, rows);
      for (int64_t tile = 0; tile < size_.column_tiles; ++tile) {
        const __m512i low = LoadElements<kElement>(low_row, tile * kLanes, low_count);
        const __m512i high = LoadElements<kElement>(high_row, tile * kLanes, high_count);
        largest.See(low);
        largest.See(high);
        StoreTerms<kTerms, /*kNearest=*/true>(low, high,
                                              tiles + tile * kTermBytes + n * kTileRowBytes);
      }
    }
  }

  // ---- Folding

  void Clear() {
    const int64_t rows = size_.row_tiles * kTileRows;
    for (int64_t n = 0; n < rows * lanes_dv_; n += kLanes) Store(o_ + n, Vec<float>{});
    for (int64_t r = 0; r < rows; r += kLanes) {
      Store(m_ + r, Splat(-kInfinity<float>));
      Store(l_ + r, Vec<float>{});
    }
  }

  void FormTileRowBlocks() {
    for (int64_t r0 = 0; r0 < t_.row_count; r0 += kTileRowBlock) {
      blocks_[block_count_++] = RowBlockOf(r0, Min(kTileRowBlock, t_.row_count - r0));
    }
  }

  void FoldRows(const RowBlock& block, int64_t j, int64_t count) {
    if (!block.Sees(j, count)) return;
    const Span span = {Max(block.begin - j, 0) / kDepth,
                       (Min(block.end - j, count) + kDepth - 1) / kDepth};
    if (block.rows > kTileRows) {
      FoldRowTiles<2>(block, j, span);
    } else {
      FoldRowTiles<1>(block, j, span);
    }
  }

  template <int kRowTiles>
  void FoldRowTiles(const RowBlock& block, int64_t j, Span span) {
    ScoreRows<kRowTiles>(block, span);
    BiasRows(block, j, span);
    for (int64_t r = 0; r < block.rows; r += kTileRows) {
      WeighRows(block.r0 + r, r, Min(kTileRows, block.rows - r), span);
    }
    AccumulateRows<kRowTiles>(block, span);
  }

  template <int kRowTiles>
  void ScoreRows(const RowBlock& block, Span span) const {
    const Operand q = {q_tiles_ + block.r0 / kTileRows * size_.depths * kTermBytes,
                       size_.depths * kTermBytes, kTermBytes};
    for (int64_t n = span.first; n < span.end; ++n) {
      const Operand k = {k_tiles_ + n * 2 * size_.depths * kTermBytes, size_.depths * kTermBytes,
                         kTermBytes};
      MultiplyBlock<Terms<kElement>::kScores, kRowTiles, 2>(
          q, k, size_.depths, /*accumulate=*/false, scores_ + n * kDepth,
          kTileKeyBlock * kFloatBytes);
    }
  }

  // Computes the biased scores; those of a plain problem stay unscaled.
  void BiasRows(const RowBlock& block, int64_t j, Span span) const {
    const int64_t first = span.first * kDepth;
    const int64_t columns = (span.end - span.first) * kDepth;
    const bool biased = block.all_begin > j + first || block.all_end < j + first + columns;
    if (plain_ && !biased) return;
    const ScoreSteps steps = {.scale = !plain_, .bias = biased};
    for (int64_t r = 0; r < block.rows; ++r) {
      rapt::FinishScores<ScoreOps<float>>(t_.score, t_.rows[block.r0 + r].score, steps, j + first,
                                          columns, scores_ + r * kTileKeyBlock + first,
                                          [](ScoreStage) RAPT_LAMBDA_INLINE {});
    }
  }

  // Turns the scores of up to 16 rows, from row r of the block on, into P.
  void WeighRows(int64_t r0, int64_t r, int64_t rows, Span span) {
    float* scores = scores_ + r * kTileKeyBlock;
    Vec<float> tile[kTileRows];
    for (int64_t n = 0; n < kTileRows; ++n) {
      tile[n] = n < rows ? RowMax(scores + n * kTileKeyBlock + span.first * kDepth,
                                  (span.end - span.first) * kDepth)
                         : Splat(-kInfinity<float>);
    }
    RaiseMaximum(r0, (__m512)MaxEach<float>(tile));
    std::byte* out = p_tiles_ + r / kTileRows * kTileKeyBlock / kDepth * kTermBytes;
    for (int64_t n = 0; n < rows; ++n) {
      const float m = m_[r0 + n];
      // m is -inf while no key is visible; relative to 0 the weights are 0, not NaN.
      tile[n] = (Vec<float>)WeighRow(scores + n * kTileKeyBlock, m == -kInfinity<float> ? 0 : m,
                                     span, out + n * kTileRowBytes);
    }
    Store(l_ + r0, Load(l_ + r0) + SumEach<float>(tile));
  }

  // Raises the maxima of 16 rows to the largest score of a block if they grew enough to rescale O.
  void RaiseMaximum(int64_t r0, __m512 now) {
    const __m512 before = _mm512_loadu_ps(m_ + r0);
    const __m512 step = _mm512_set1_ps(log2_step_);
    const __m512 growth = _mm512_mul_ps(_mm512_sub_ps(now, before), step);
    const __mmask16 raised = _mm512_cmp_ps_mask(growth, _mm512_set1_ps(kSlack), _CMP_GT_OQ);
    if (raised == 0) return;
    _mm512_mask_storeu_ps(m_ + r0, raised, now);
    const __m512 alpha = Exp2<5>(_mm512_mul_ps(_mm512_sub_ps(before, now), step));
    _mm512_mask_storeu_ps(l_ + r0, raised, _mm512_mul_ps(_mm512_loadu_ps(l_ + r0), alpha));
    float alphas[kTileRows];
    _mm512_storeu_ps(alphas, alpha);
    for (int64_t r = 0; r < kTileRows; ++r) {
      if ((raised >> r & 1) == 0) continue;
      float* o = o_ + (r0 + r) * lanes_dv_;
      for (int64_t d = 0; d < lanes_dv_; d += kLanes) Store(o + d, Load(o + d) * alphas[r]);
    }
  }

  // Stores a row's weights in P and returns their sum, lane by lane. Computes (s - m) c: s c - m c
  // would overflow for large scores.
  RAPT_INLINE __m512 WeighRow(const float* scores, float m, Span span, std::byte* out) const {
    const __m512 base = _mm512_set1_ps(m);
    const __m512 step = _mm512_set1_ps(log2_step_);
    const auto weights = [&](const float* s) RAPT_LAMBDA_INLINE {
      return Exp2<Terms<kElement>::kExpDegree>(
          _mm512_mul_ps(_mm512_sub_ps(_mm512_loadu_ps(s), base), step));
    };
    __m512 sum = _mm512_setzero_ps();
    for (int64_t n = span.first; n < span.end; ++n) {
      const __m512 low = weights(scores + n * kDepth);
      const __m512 high = weights(scores + n * kDepth + kLanes);
      sum = _mm512_add_ps(sum, _mm512_add_ps(low, high));
      StoreWeights(_mm512_castps_si512(low), _mm512_castps_si512(high), out + n * kTermBytes);
    }
    return sum;
  }

  // A single term is rounded. Several terms may be truncated, because their sum is the number.
  static void StoreWeights(__m512i low, __m512i high, std::byte* out) {
    if constexpr (kTerms == 1) {
      _mm512_store_si512(out, Pair(RoundUpper(low), RoundUpper(high)));
    } else {
      StoreTerms<kTerms, /*kNearest=*/false>(low, high, out);
    }
  }

  template <int kRowTiles>
  void AccumulateRows(const RowBlock& block, Span span) const {
    const Operand p = {p_tiles_ + span.first * kTermBytes, kTileKeyBlock / kDepth * kTermBytes,
                       kTermBytes};
    const auto columns = [&](int64_t tile, auto count) RAPT_LAMBDA_INLINE {
      const Operand v = {v_tiles_ + (span.first * size_.column_tiles + tile) * kTermBytes,
                         kTermBytes, size_.column_tiles * kTermBytes};
      MultiplyBlock<Terms<kElement>::kOutput, kRowTiles, count>(
          p, v, span.end - span.first, /*accumulate=*/true,
          o_ + block.r0 * lanes_dv_ + tile * kLanes, lanes_dv_ * kFloatBytes);
    };
    int64_t tile = 0;
    for (; tile + 2 <= size_.column_tiles; tile += 2)
      columns(tile, std::integral_constant<int, 2>{});
    if (tile < size_.column_tiles) columns(tile, std::integral_constant<int, 1>{});
  }

  // Flash::Finish() expects the maxima of the biased scores.
  void FinishRows() {
    const float unit = plain_ ? static_cast<float>(t_.score.scale) : 1.0f;
    for (int64_t r = 0; r < t_.row_count; ++r) m_[r] *= unit;
    Finish();
  }

  const Size size_;
  const bool plain_;       // scores are Q K^T times a positive scale and nothing else
  const float log2_step_;  // a score difference of 1 in powers of two
  RowBlock blocks_[kMostTileRowBlocks];
  int64_t block_count_ = 0;
  std::byte* q_tiles_;     // [row tiles][depths][terms]
  std::byte* k_tiles_;     // [column tiles][depths][terms]
  std::byte* v_tiles_;     // [depth blocks][column tiles][terms]
  std::byte* p_tiles_;     // [2][depth blocks][terms]
  float* scores_;          // [kTileRowBlock][kTileKeyBlock]
  std::byte* row_buffer_;  // where ReadKeys() and ReadValues() gather rows
};

// Tiles are not used for additive scores; for vectors by distance; for normalizers other than
// softmax; for rows that see no interval of keys; for a few rows, which are bound by memory; for
// score outputs, dropout and keys in 8 bits, which favor clarity over speed; or for scales that
// magnify flushed subnormals beyond noise.
bool Suits(const FlashTask& task) {
  return task.additive.weights == nullptr && task.vectors.keys.data == nullptr &&
         task.vectors.values.data == nullptr && task.alpha == 0 && !task.sparse &&
         task.selection.indices == nullptr && task.row_count > kFewRows &&
         task.score_stage == ScoreStage::kNone && task.dropout == 0 && !task.q8_0 &&
         __builtin_fabs(task.score.scale) < kTooLargeScale;
}

// Calls body with the tag of the task's type if tiles suit the task.
template <typename Body>
RAPT_INLINE void WithTiles(const FlashTask& task, Body body) {
  if (!Suits(task)) return;
  WithElement(task.element, [&](auto tag) RAPT_LAMBDA_INLINE {
    if constexpr (decltype(tag)::value != Element::kFloat64) body(tag);
  });
}

bool FlashFp32(const FlashTask& task) {
  TileOutcome outcome = TileOutcome::kNotForTiles;
  WithTiles(task, [&](auto tag) RAPT_LAMBDA_INLINE {
    outcome = TileFlash<decltype(tag)::value>(task).Run();
  });
  if (outcome == TileOutcome::kNotForTiles) return kAvx512Kernels.flash_fp32(task);
  return outcome == TileOutcome::kDone;
}

int64_t TileScratchBytes(const FlashTask& task) {
  int64_t bytes = 0;
  WithTiles(task, [&](auto tag) RAPT_LAMBDA_INLINE {
    bytes = TileFlash<decltype(tag)::value>::ScratchBytes(task);
  });
  return bytes;
}

}  // namespace

extern const KernelTable kAmxKernels = {FlashFp32,
                                        FlashFp64,
                                        TileScratchBytes,
                                        Rotate,
                                        BackwardFp32,
                                        BackwardFp64,
                                        StoreRow<float>,
                                        StoreRow<double>,
                                        kLinear<&KernelTable::linear_fp32>,
                                        kLinear<&KernelTable::linear_fp64>};

}  // namespace rapt::cpu
