// Projections of BF16 by BF16 with the tiles of AMX-BF16: 2 x 2 tiles of sums stay in registers.
#define RAPT_VECTOR_BYTES 64
#define RAPT_MICRO_ROWS 6
#define RAPT_MICRO_VECTORS 4
#include <immintrin.h>

#include "attention/cpu/projection.inc"
// After the kernels, which it uses.
#include "attention/cpu/projection_pairs.inc"
#include "attention/cpu/tile_unit.h"

namespace rapt::cpu {
namespace {

// Numbers of a row of x in a row of a tile.
constexpr int64_t kTileDepth = kTileRowBytes / SizeOf(Element::kBFloat16);
static_assert(kPairDepth % kTileDepth == 0);
static_assert(kMostProjectedRows % (2 * kTileRows) == 0);

struct TileBlocks : PairBlocks<kTileDepth> {
  static_assert(kDepthBlock % kTileDepth == 0);

  // Tiles have 16 rows, which x may not have.
  static constexpr bool kInPlace = false;
  static bool TakesInPlace(const ProjectionTask& /*task*/) { return false; }

  static void Multiply(const ProjectionTask& task, const std::byte* a, int64_t a_bytes,
                       const std::byte* panel, int64_t d, int64_t depth, int64_t /*columns*/,
                       bool adds, std::byte* /*converted*/, float* c, int64_t c_stride) {
    // For this block only, because code that runs at a checkpoint sets its own configuration.
    const TileConfiguration configuration;
    const std::byte* const b = panel + d * kPanelColumns * SizeOf(Element::kBFloat16);
    for (int64_t r = 0; r < task.rows; r += 2 * kTileRows) {
      for (int64_t n = 0; n < kPanelColumns; n += 2 * kTileRows) {
        const bool two = task.rows - r > kTileRows;
        (two ? MultiplyTileRows<2> : MultiplyTileRows<1>)(a + r * a_bytes, a_bytes,
                                                          b + n * kPairBytes, depth, adds,
                                                          c + r * c_stride + n, c_stride);
      }
    }
  }

 private:
  static constexpr int64_t kPairBytes = 4;
  // Between rows of a panel, which have a pair of each column.
  static constexpr int64_t kPairRowBytes = kPanelColumns * kPairBytes;

  // kRows x 2 tiles. Rows of x beyond the task's have sums that are not stored.
  template <int kRows>
  static void MultiplyTileRows(const std::byte* a, int64_t a_bytes, const std::byte* b,
                               int64_t depth, bool adds, float* c, int64_t c_stride) {
    const int64_t c_bytes = c_stride * int64_t{sizeof(float)};
    float* const second = c + kTileRows * c_stride;
    if (adds) {
      LoadTile<0>(c, c_bytes);
      LoadTile<1>(c + kTileRows, c_bytes);
      if constexpr (kRows == 2) LoadTile<2>(second, c_bytes);
      if constexpr (kRows == 2) LoadTile<3>(second + kTileRows, c_bytes);
    } else {
      ZeroTile<0>();
      ZeroTile<1>();
      if constexpr (kRows == 2) ZeroTile<2>();
      if constexpr (kRows == 2) ZeroTile<3>();
    }
    for (int64_t k = 0; k < depth; k += kTileDepth) {
      const std::byte* const columns = b + k / 2 * kPairRowBytes;
      LoadTile<4>(a + k * SizeOf(Element::kBFloat16), a_bytes);
      LoadTile<6>(columns, kPairRowBytes);
      LoadTile<7>(columns + kTileRowBytes, kPairRowBytes);
      MultiplyTiles<0, 4, 6>();
      MultiplyTiles<1, 4, 7>();
      if constexpr (kRows == 1) continue;
      LoadTile<5>(a + kTileRows * a_bytes + k * SizeOf(Element::kBFloat16), a_bytes);
      MultiplyTiles<2, 5, 6>();
      MultiplyTiles<3, 5, 7>();
    }
    StoreTile<0>(c, c_bytes);
    StoreTile<1>(c + kTileRows, c_bytes);
    if constexpr (kRows == 2) StoreTile<2>(second, c_bytes);
    if constexpr (kRows == 2) StoreTile<3>(second + kTileRows, c_bytes);
  }
};

}  // namespace

extern const ProjectionKernels kAmxProjectionKernels = {kPairProjection<TileBlocks>,
                                                        kFp64Projection};

}  // namespace rapt::cpu
