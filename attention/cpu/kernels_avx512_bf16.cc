// Kernels for AVX-512 and its dot products of pairs of bf16 numbers, each of which takes the time
// of an FMA on AMD's processors.
//
// BF16 is computed by dot products, in tiles or, for a few rows as in decoding, in the loop of
// Flash: Q K^T multiplies pairs of neighbours in depth, exactly and summed in fp32; P V multiplies
// the weights of pairs of keys, rounded to bf16, with their values. Everything else is left to the
// AVX-512 kernel.
//
// Dot products flush subnormal factors and sums, which matters only beside a very large factor:
// such rows of Q and scales are left to the AVX-512 kernel. A few rows' scores are scaled after
// Q K^T, which may overflow where FMA would not, and V is not searched for NaN and Inf of hidden
// keys. A task whose sums are not finite starts over with the AVX-512 kernel.
#define RAPT_VECTOR_BYTES 64
#define RAPT_MICRO_ROWS 6
#define RAPT_MICRO_VECTORS 4
#include <immintrin.h>

#include "attention/cpu/kernels.inc"
// After the kernels, which they use.
#include "attention/cpu/avx512_fallback.inc"
#include "attention/cpu/tile_flash.inc"

namespace rapt::cpu {
namespace {

// Elements of a vector of bf16 numbers.
constexpr int64_t kPairLanes = 2 * Simd<float>::kLanes;
constexpr int64_t kElementBytes = SizeOf(Element::kBFloat16);

RAPT_INLINE __m512i LoadPairs(const std::byte* p) { return _mm512_loadu_si512(p); }

RAPT_INLINE Vec<float> AddDots(Vec<float> sum, __m512i a, __m512i b) {
  return (Vec<float>)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
}

// Rows of Q are bf16, too.
struct PairProducts {
  using Real = float;
  static constexpr int64_t kElements = kPairLanes;

  RAPT_INLINE static int64_t Offset(int64_t n) { return n * kElementBytes; }
  RAPT_INLINE static __m512i LoadFrom(const std::byte* row, int64_t n, int64_t /*count*/) {
    return LoadPairs(row + Offset(n));
  }
  RAPT_INLINE static __m512i LoadRow(const float* row, int64_t d) {
    return LoadFrom(reinterpret_cast<const std::byte*>(row), d, kElements);
  }
  RAPT_INLINE static Vec<float> Add(Vec<float> sum, __m512i row, __m512i key) {
    return AddDots(sum, row, key);
  }
};

// Takes no more scratch memory than Flash.
class PairFlash {
 public:
  // REQUIRES: SuitsPairs(task).
  PairFlash(const FlashTask& task, Scratch& scratch)
      : t_(task),
        meter_(task.checkpoint, kCheckpointPairs),
        reader_(task, scratch),
        blocks_(task),
        packed_(task, scratch),
        in_place_(task, reader_, packed_.keys(), packed_.values()),
        scores_(task, blocks_, scratch),
        rows_(task, task.row_count, scratch) {}

  Outcome Run() {
    scores_.LoadQueries<Element::kBFloat16>(reader_);
    for (int64_t r = 0; r < t_.row_count; ++r) {
      if (!LoadQueryPairs(r)) return Outcome::kNotSuited;
    }
    rows_.Clear();
    blocks_.Form();
    for (int64_t j = blocks_.KeysToRead().begin; j < t_.visible.end; j += kKeyBlock) {
      const int64_t count = Min(kKeyBlock, t_.visible.end - j);
      if (!meter_.Pass(PairsOf(t_, count))) return Outcome::kAbandoned;
      FoldPairs(j, count);
    }
    if (!rows_.IsFinite() || !HasMaxima()) return Outcome::kNotSuited;
    OrderColumns();
    rows_.Finish();
    return Outcome::kDone;
  }

 private:
  static constexpr int64_t kLanes = Simd<float>::kLanes;

  // Replaces row r of Q by its elements. Returns whether each is 0, or normal and below 2^32. What
  // is then flushed is less than 2^-94, which no scale that suits makes count.
  bool LoadQueryPairs(int64_t r) {
    auto* const row = reinterpret_cast<std::byte*>(scores_.Query(r));
    const int64_t row_bytes = t_.head_size * kElementBytes;
    memcpy(row, reader_.Read(t_.queries, t_.rows[r].query, row_bytes),
           static_cast<size_t>(row_bytes));
    constexpr int kLeastNormal = 0x0080, kTooLarge = 0x4F80;  // 2^-126, 2^32
    bool fits = true;
    for (int64_t d = 0; d < t_.head_size; ++d) {
      const int magnitude = LoadAs<uint16_t>(row + d * kElementBytes) & 0x7FFF;
      fits &= magnitude == 0 || (magnitude >= kLeastNormal && magnitude < kTooLarge);
    }
    return fits;
  }

  void FoldPairs(int64_t j, int64_t count) {
    const RowBlock& block = blocks_[0];
    if (!blocks_.Sees(block, j, count)) return;
    in_place_.FindKeys(j, count);
    in_place_.FindValues(j);
    FewRows<float>::DotRows<PairProducts>(scores_.Query(0), scores_.lanes_d(), t_.row_count,
                                          in_place_.Keys(), in_place_.AfterKeys(), scores_.Row(0));
    const int64_t columns = RoundUp(count, kLanes);
    if (ScalesQueries(t_)) ScaleScores(columns);
    scores_.Finish(block, j, count, columns);
    rows_.Fold(block, j, count, columns, scores_.Row(0));
    in_place_.FindNextKeys(j + kKeyBlock, t_.visible.end);
    const NextRows next = in_place_.AfterValues();
    int64_t r = 0;
    for (; r + 4 <= t_.row_count; r += 4) AddPairs<4>(r, r == 0 ? next : NextRows());
    for (; r + 2 <= t_.row_count; r += 2) AddPairs<2>(r, r == 0 ? next : NextRows());
    for (; r < t_.row_count; ++r) AddPairs<1>(r, r == 0 ? next : NextRows());
  }

  void ScaleScores(int64_t columns) {
    const Vec<float> scale = Splat(static_cast<float>(t_.score.scale));
    for (int64_t r = 0; r < t_.row_count; ++r) {
      float* s = scores_.Row(r);
      for (int64_t c = 0; c < columns; c += kLanes) Store(s + c, Load(s + c) * scale);
    }
  }

  // O = alpha O + P V for kRows rows.
  template <int kRows>
  void AddPairs(int64_t r, const NextRows& next) {
    for (int n = 0; n < kRows; ++n) RoundWeights(scores_.Row(r + n));
    int64_t n = 0;
    for (; n + 2 * kPairLanes <= t_.value_head_size; n += 2 * kPairLanes) {
      AddPanelOfPairs<kRows, 2>(r, n, next);
    }
    if (n < t_.value_head_size) {
      AddPanelOfPairs<kRows, 1>(r, n, next);
    }
  }

  // Rounds a row of weights to bf16, in place.
  static void RoundWeights(float* s) {
    for (int64_t c = 0; c < kKeyBlock; c += kPairLanes) {
      const auto first = (__m512)Load(s + c);
      const auto second = (__m512)Load(s + c + kLanes);
      _mm512_storeu_si512(s + c / 2, (__m512i)_mm512_cvtne2ps_pbh(second, first));
    }
  }

  // The same for kPairs vectors of pairs of columns from n on. The values of two keys are
  // interleaved within 128 bits, so that a vector of sums has every other four columns; see
  // OrderColumns().
  template <int kRows, int kPairs>
  void AddPanelOfPairs(int64_t r0, int64_t n, const NextRows& next) {
    const Rows values = in_place_.Values();
    const int64_t stride = rows_.lanes_dv;
    float* const o = rows_.Output(r0) + n;
    Vec<float> sums[kRows][2 * kPairs];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 2 * kPairs; ++v) {
        sums[r][v] = Load(o + r * stride + v * kLanes) * Splat(rows_.alpha[r0 + r]);
      }
    }
    for (int64_t c = 0; c < values.count; c += 2) {
      // The weight of a key that only completes a pair is 0.
      const std::byte* const rows[] = {values.at[c], values.at[Min(c + 1, values.count - 1)]};
      __m512i pairs[2 * kPairs];
#pragma GCC unroll 2
      for (int v = 0; v < kPairs; ++v) {
        const int64_t offset = (n + v * kPairLanes) * kElementBytes;
        next.PrefetchLine(c, offset);
        next.PrefetchLine(c + 1, offset);
        const __m512i a = LoadPairs(rows[0] + offset);
        const __m512i b = LoadPairs(rows[1] + offset);
        pairs[2 * v] = _mm512_unpacklo_epi16(a, b);
        pairs[2 * v + 1] = _mm512_unpackhi_epi16(a, b);
      }
#pragma GCC unroll 4
      for (int r = 0; r < kRows; ++r) {
        const auto* weights = reinterpret_cast<const std::byte*>(scores_.Row(r0 + r));
        const __m512i weight = _mm512_set1_epi32(LoadAs<int32_t>(weights + c * kElementBytes));
#pragma GCC unroll 4
        for (int v = 0; v < 2 * kPairs; ++v) sums[r][v] = AddDots(sums[r][v], weight, pairs[v]);
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int v = 0; v < 2 * kPairs; ++v) Store(o + r * stride + v * kLanes, sums[r][v]);
    }
  }

  // Whether every row that sees an interval of keys has a maximum. Without one all of its scores
  // may have overflowed.
  bool HasMaxima() const {
    for (int64_t r = 0; r < t_.row_count; ++r) {
      const bool sees = t_.rows[r].score.begin < t_.rows[r].score.end;
      if (sees && !__builtin_isfinite(rows_.m[r])) return false;
    }
    return true;
  }

  // Puts the columns of O in order.
  void OrderColumns() {
    const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
    const __m512i second = _mm512_or_si512(first, _mm512_set1_epi32(8));
    float* const o = rows_.o;
    for (int64_t n = 0; n < t_.row_count * rows_.lanes_dv; n += kPairLanes) {
      const auto low = (__m512)Load(o + n);
      const auto high = (__m512)Load(o + n + kLanes);
      Store(o + n, (Vec<float>)_mm512_permutex2var_ps(low, first, high));
      Store(o + n + kLanes, (Vec<float>)_mm512_permutex2var_ps(low, second, high));
    }
  }

  const FlashTask& t_;
  WorkMeter meter_;
  KeyReader<float> reader_;
  RowBlocks blocks_;
  PackedBlock<float> packed_;  // only its memory
  RowsInPlace<float> in_place_;
  Scores<float> scores_;
  SoftmaxRows<float> rows_;
};

// Products of the tiles of tile_flash.inc. 4 rows x 4 vectors of sums stay in registers: eight
// loads for sixteen dot products.
struct DotTileProducts {
  struct Configuration {};

  template <Element kElement>
  static constexpr bool kSuits = kElement == Element::kBFloat16;

  template <const auto& kProducts>
  RAPT_INLINE static void Multiply(const Operand& a, const Operand& b, const TileShape& shape,
                                   bool accumulate, float* c, int64_t c_stride) {
    static_assert(kProducts.count == 1);
    int64_t tile = 0;
    const auto columns = [&](auto count) RAPT_LAMBDA_INLINE {
      for (; tile + count <= shape.columns; tile += count) {
        MultiplyColumns<count>(a, {b.tiles + tile * b.step, b.step, b.depth_step}, shape,
                               accumulate, reinterpret_cast<std::byte*>(c + tile * kLanes),
                               c_stride);
      }
    };
    columns(std::integral_constant<int, 4>{});
    columns(std::integral_constant<int, 2>{});
    columns(std::integral_constant<int, 1>{});
  }

 private:
  static constexpr int64_t kLanes = Simd<float>::kLanes;
  static constexpr int kRows = 4;
  static_assert(kTileRows % kRows == 0);

  template <int kColumns>
  static void MultiplyColumns(const Operand& a, const Operand& b, const TileShape& shape,
                              bool accumulate, std::byte* c, int64_t c_stride) {
    for (int64_t r = 0; r < shape.rows; r += kRows) {
      const std::byte* rows = a.tiles + r / kTileRows * a.step + r % kTileRows * kTileRowBytes;
      MultiplyRows<kColumns>({rows, a.step, a.depth_step}, b, shape.depths, accumulate,
                             c + r * c_stride, c_stride);
    }
  }

  template <int kColumns>
  RAPT_INLINE static void MultiplyRows(const Operand& a, const Operand& b, int64_t depths,
                                       bool accumulate, std::byte* c, int64_t c_stride) {
    const auto sum_at = [&](int r, int n) RAPT_LAMBDA_INLINE {
      return reinterpret_cast<float*>(c + r * c_stride) + n * kLanes;
    };
    Vec<float> sums[kRows][kColumns];
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < kColumns; ++n) {
        sums[r][n] = accumulate ? Load(sum_at(r, n)) : Vec<float>{};
      }
    }
    for (int64_t depth = 0; depth < depths; ++depth) {
      const std::byte* const row = a.tiles + depth * a.depth_step;
      const std::byte* const column = b.tiles + depth * b.depth_step;
      for (int64_t k = 0; k < kTileRows; ++k) {
        __m512i pairs[kColumns];
#pragma GCC unroll 4
        for (int n = 0; n < kColumns; ++n) {
          pairs[n] = LoadPairs(column + n * b.step + k * kTileRowBytes);
        }
#pragma GCC unroll 4
        for (int r = 0; r < kRows; ++r) {
          const int32_t pair = LoadAs<int32_t>(row + r * kTileRowBytes + k * int64_t{4});
          const __m512i factor = _mm512_set1_epi32(pair);
#pragma GCC unroll 4
          for (int n = 0; n < kColumns; ++n) sums[r][n] = AddDots(sums[r][n], factor, pairs[n]);
        }
      }
    }
#pragma GCC unroll 4
    for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 4
      for (int n = 0; n < kColumns; ++n) Store(sum_at(r, n), sums[r][n]);
    }
  }
};

bool SuitsPairs(const FlashTask& task) {
  return SuitsProducts(task) && task.element == Element::kBFloat16 && task.row_count <= kFewRows &&
         task.head_size % kPairLanes == 0 && task.value_head_size % kPairLanes == 0 &&
         task.rotary.rotate == nullptr;
}

Outcome FoldPairsOrTiles(const FlashTask& task) {
  if (!SuitsPairs(task)) return FoldTiles<DotTileProducts>(task);
  Scratch scratch(task.scratch);
  return PairFlash(task, scratch).Run();
}

}  // namespace

extern const KernelTable kAvx512Bf16Kernels = kTableWithTiles<DotTileProducts, FoldPairsOrTiles>;

}  // namespace rapt::cpu
