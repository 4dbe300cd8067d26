#include "attention/cpu/instruction_sets.h"

#include <array>

#include "attention/cpu/machine.h"
#include "attention/mechanism/linear/linear_kernels.h"
#include "attention/rotary/rotate.h"
#include "base/check.h"

namespace rapt::cpu {
namespace {

struct Entry {
  absl::string_view name;
  bool (*available)();
  const KernelTable* kernels;
};

constexpr Entry kEntries[] = {
#define RAPT_INSTRUCTION_SET(set, name, detected) {#set, detected, &k##name##Kernels},
#include "attention/cpu/instruction_sets.def"
#undef RAPT_INSTRUCTION_SET
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

namespace rapt {

RotateFunction FastestRotateRow() {
  for (const InstructionSet& set : cpu::InstructionSets()) {
    if (set.available) return cpu::Kernels(set.name).rotate;
  }
  return RotateRow;
}

const LinearKernel& LinearKernelOf(absl::string_view isa, DType accumulator) {
  const cpu::KernelTable& kernels = cpu::Kernels(isa);
  return accumulator == DType::kFloat64 ? kernels.linear_fp64 : kernels.linear_fp32;
}

}  // namespace rapt
