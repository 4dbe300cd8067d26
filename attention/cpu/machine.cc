#include "attention/cpu/machine.h"

#include <asm/prctl.h>
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstdint>

namespace rapt::cpu {
namespace {

// State components, by their bits in XCR0.
constexpr int kTileConfiguration = 17;
constexpr int kTileData = 18;
// CPUID leaf 7, EDX.
constexpr unsigned kAmxBf16 = 1u << 22;
constexpr unsigned kAmxTile = 1u << 24;
// CPUID leaf 7, subleaf 1, EAX.
constexpr unsigned kAvx512Bf16 = 1u << 5;

// The state that the operating system saves when it switches threads.
uint64_t Xcr0() {
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0 || (ecx & bit_OSXSAVE) == 0) return 0;
  asm volatile("xgetbv" : "=a"(eax), "=d"(edx) : "c"(0));
  return static_cast<uint64_t>(edx) << 32 | eax;
}

}  // namespace

// __builtin_cpu_supports also checks that the operating system saves the wide registers.
bool HasX8664V3() {
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid(1, &eax, &ebx, &ecx, &edx) == 0) return false;
  const bool f16c_and_movbe = (ecx & bit_F16C) != 0 && (ecx & bit_MOVBE) != 0;
  if (__get_cpuid(0x80000001, &eax, &ebx, &ecx, &edx) == 0) return false;
  return f16c_and_movbe && (ecx & bit_LZCNT) != 0 && __builtin_cpu_supports("avx2") &&
         __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi") &&
         __builtin_cpu_supports("bmi2");
}

bool HasX8664V4() {
  return HasX8664V3() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512cd") && __builtin_cpu_supports("avx512dq") &&
         __builtin_cpu_supports("avx512vl");
}

bool HasFastAvx512Bf16() {
  if (!HasX8664V4() || !__builtin_cpu_is("amd")) return false;
  unsigned eax, ebx, ecx, edx;
  return __get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx) != 0 && (eax & kAvx512Bf16) != 0;
}

bool HasAmxBf16() {
  if (!HasX8664V4()) return false;
  unsigned eax, ebx, ecx, edx;
  if (__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx) == 0) return false;
  if ((edx & kAmxTile) == 0 || (edx & kAmxBf16) == 0) return false;
  constexpr uint64_t kTileState = uint64_t{1} << kTileConfiguration | uint64_t{1} << kTileData;
  if ((Xcr0() & kTileState) != kTileState) return false;
  return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, kTileData) == 0;
}

}  // namespace rapt::cpu
