#include "bench/probes.h"

#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <thread>
#include <vector>

namespace {

constexpr int kTries = 3;

// Returns the best rate of a few tries; `body(thread)` does `work` units of work on each thread.
template <typename Body>
double BestRate(int threads, double work, Body body) {
  double best = 0;
  for (int n = 0; n < kTries; ++n) {
    const auto begin = std::chrono::steady_clock::now();
    std::vector<std::thread> others;
    for (int thread = 1; thread < threads; ++thread) others.emplace_back(body, thread);
    body(0);
    for (std::thread& other : others) other.join();
    const std::chrono::duration<double> seconds = std::chrono::steady_clock::now() - begin;
    best = std::max(best, work * threads / seconds.count());
  }
  return best;
}

constexpr int kSums = 12;  // Independent sums, enough to hide the latency of an FMA on two ports.
constexpr int kSteps = 8'000'000;

// In assembly, because a compiler would remove it or keep the sums in memory.
#define RAPT_FMA(kind, sum) "vfmadd231ps %%" kind "15, %%" kind "15, %%" kind sum "\n"
#define RAPT_FMAS(kind) \
  RAPT_FMA(kind, "0")   \
  RAPT_FMA(kind, "1")   \
  RAPT_FMA(kind, "2")   \
  RAPT_FMA(kind, "3")   \
  RAPT_FMA(kind, "4")   \
  RAPT_FMA(kind, "5")   \
  RAPT_FMA(kind, "6")   \
  RAPT_FMA(kind, "7")   \
  RAPT_FMA(kind, "8") RAPT_FMA(kind, "9") RAPT_FMA(kind, "10") RAPT_FMA(kind, "11")
#define RAPT_SUM_REGISTERS                                                                 \
  "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8", "xmm9", "xmm10", \
      "xmm11", "xmm15"

void FmaAvx512() {
  asm volatile("vzeroall" ::
                   : RAPT_SUM_REGISTERS);  // Subnormal numbers would be slow on some processors.
  for (int step = 0; step < kSteps; ++step) asm volatile(RAPT_FMAS("zmm")::: RAPT_SUM_REGISTERS);
  asm volatile("vzeroupper" ::: RAPT_SUM_REGISTERS);
}

void FmaAvx2() {
  asm volatile("vzeroall" ::: RAPT_SUM_REGISTERS);
  for (int step = 0; step < kSteps; ++step) asm volatile(RAPT_FMAS("ymm")::: RAPT_SUM_REGISTERS);
  asm volatile("vzeroupper" ::: RAPT_SUM_REGISTERS);
}

// Linux grants the tile registers on request only.
bool RequestTiles() {
  constexpr int kArchReqXcompPerm = 0x1023, kTileData = 18;
  return syscall(SYS_arch_prctl, kArchReqXcompPerm, kTileData) == 0;
}

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t bytes_per_row[16] = {};
  uint8_t rows[16] = {};
};

constexpr int kTileSteps = 1'000'000;

__attribute__((target("amx-tile,amx-bf16"))) void Amx() {
  TileConfig config;
  for (int tile = 0; tile < 8; ++tile) {
    config.bytes_per_row[tile] = 64;
    config.rows[tile] = 16;
  }
  asm volatile("" : "+m"(config));  // Otherwise g++ 12 drops the stores.
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int step = 0; step < kTileSteps; ++step) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  _tile_release();
}

bool HasAmx() {
  constexpr unsigned kAmxBf16 = 1U << 22, kAmxTile = 1U << 24;
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) != 0 &&
         (edx & (kAmxBf16 | kAmxTile)) == (kAmxBf16 | kAmxTile) && RequestTiles();
}

// Each thread's part of the buffer, far larger than its share of the last-level cache.
constexpr size_t kReadBytes = size_t{256} << 20;

__attribute__((target("avx2"))) void Read(const char* data, size_t bytes) {
  __m256i sums[4] = {};
  constexpr size_t kStep = sizeof(sums);
  for (size_t offset = 0; offset < bytes; offset += kStep) {
    _mm_prefetch(data + offset + 1024, _MM_HINT_T0);
    _mm_prefetch(data + offset + 1088, _MM_HINT_T0);
#pragma GCC unroll 4
    for (int n = 0; n < 4; ++n) {
      const auto* address = reinterpret_cast<const __m256i*>(data + offset) + n;
      sums[n] = _mm256_xor_si256(sums[n], _mm256_loadu_si256(address));
    }
  }
  for (int n = 0; n < 4; ++n) asm volatile("" ::"x"(sums[n]));
}

}  // namespace

double rapt_probe_fma_gflops(int threads) {
  const bool avx512 = __builtin_cpu_supports("avx512f");
  const double flops = 2.0 * kSteps * kSums * (avx512 ? 16 : 8);
  return BestRate(threads, flops, [&](int) { avx512 ? FmaAvx512() : FmaAvx2(); }) * 1e-9;
}

double rapt_probe_amx_gflops(int threads) {
  if (!HasAmx()) return 0;
  const double flops = 2.0 * kTileSteps * 4 * 16 * 16 * 32;
  return BestRate(threads, flops, [](int) { Amx(); }) * 1e-9;
}

double rapt_probe_read_gbps(int threads) {
  // Written once; otherwise all pages would map the zero page.
  static const std::vector<char> data(kReadBytes * 2, 1);
  const size_t part = data.size() / static_cast<size_t>(threads) / 4096 * 4096;
  const auto read = [&](int thread) {
    Read(data.data() + part * static_cast<size_t>(thread), part);
  };
  return BestRate(threads, static_cast<double>(part), read) * 1e-9;
}
