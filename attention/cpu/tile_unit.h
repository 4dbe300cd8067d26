// The tile registers of AMX, for kernels_amx.cc alone. Every tile has the maximum size. Inline
// assembly, because the intrinsics of g++ 12 do not declare the memory they read: it drops the
// stores to a configuration, or moves stores to a tile past the instruction that loads it.
#ifndef RAPT_ATTENTION_CPU_TILE_UNIT_H_
#define RAPT_ATTENTION_CPU_TILE_UNIT_H_

#include <cstddef>
#include <cstdint>

#include "attention/cpu/kernels.h"

namespace rapt::cpu {
namespace {

// The creating thread may use tiles during the object's lifetime.
class TileConfiguration {
 public:
  TileConfiguration() {
    Layout layout = {};
    layout.palette = 1;
    for (int tile = 0; tile < 8; ++tile) {
      layout.row_bytes[tile] = kTileRowBytes;
      layout.rows[tile] = kTileRows;
    }
    asm volatile("ldtilecfg %0" : : "m"(layout));
  }
  // Context switches are cheaper for a thread without live tiles.
  ~TileConfiguration() { asm volatile("tilerelease"); }

  TileConfiguration(const TileConfiguration&) = delete;
  TileConfiguration& operator=(const TileConfiguration&) = delete;

 private:
  struct alignas(64) Layout {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
  };
  static_assert(sizeof(Layout) == 64);
};

template <int kTile>
inline __attribute__((always_inline)) void ZeroTile() {
  asm volatile("tilezero %%tmm%c0" : : "i"(kTile));
}

// Rows are `stride` bytes apart.
template <int kTile>
inline __attribute__((always_inline)) void LoadTile(const void* rows, int64_t stride) {
  asm volatile("tileloadd (%0,%1,1), %%tmm%c2" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
}

template <int kTile>
inline __attribute__((always_inline)) void StoreTile(void* rows, int64_t stride) {
  asm volatile("tilestored %%tmm%c2, (%0,%1,1)" : : "r"(rows), "r"(stride), "i"(kTile) : "memory");
}

// C += A B: fp32 sums of bf16 products. A's rows and B's columns hold pairs of neighbors in depth;
// row k of B has pair k of each column.
template <int kC, int kA, int kB>
inline __attribute__((always_inline)) void MultiplyTiles() {
  asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" : : "i"(kC), "i"(kA), "i"(kB));
}

}  // namespace
}  // namespace rapt::cpu

#endif  // RAPT_ATTENTION_CPU_TILE_UNIT_H_
