// The instruction sets that the CPU backend has kernels for.
#ifndef RAPT_ATTENTION_CPU_INSTRUCTION_SETS_H_
#define RAPT_ATTENTION_CPU_INSTRUCTION_SETS_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/backend.h"
#include "attention/cpu/kernels.h"

namespace rapt::cpu {

// Best first, the portable baseline last. Availability is detected once.
absl::Span<const InstructionSet> InstructionSets();

// REQUIRES: `isa` is one of InstructionSets() that is available.
const KernelTable& Kernels(absl::string_view isa);

}  // namespace rapt::cpu

#endif  // RAPT_ATTENTION_CPU_INSTRUCTION_SETS_H_
