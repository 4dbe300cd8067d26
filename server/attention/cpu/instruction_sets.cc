#include "server/attention/cpu/instruction_sets.h"

#include <cpuid.h>

#include <array>

#include "server/base/check.h"

namespace rapt::cpu {
namespace {

struct Entry {
  absl::string_view name;
  bool (*available)();
  const KernelTable* kernels;
};

// What -march=x86-64-v3 lets the compiler use. The compiler's probe covers the operating system's
// part, that it saves the wide registers.
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

constexpr Entry kEntries[] = {
    {"avx512", HasX8664V4, &kAvx512Kernels},
    {"avx2", HasX8664V3, &kAvx2Kernels},
    {"portable", [] { return true; }, &kPortableKernels},
};

}  // namespace

absl::Span<const InstructionSet> InstructionSets() {
  static const auto kSets = [] {
    std::array<InstructionSet, std::size(kEntries)> sets;
    for (size_t n = 0; n < sets.size(); ++n) sets[n] = {kEntries[n].name, kEntries[n].available()};
    return sets;
  }();
  return kSets;
}

const KernelTable& Kernels(absl::string_view isa) {
  for (size_t n = 0; n < std::size(kEntries); ++n) {
    if (kEntries[n].name == isa && InstructionSets()[n].available) return *kEntries[n].kernels;
  }
  CheckFailed(__FILE__, __LINE__, "isa is available", "a plan names one that is not");
}

}  // namespace rapt::cpu
