// The instruction sets that the CPU backend has kernels for: the one list.
#ifndef RAPT_ATTENTION_CPU_INSTRUCTION_SETS_H_
#define RAPT_ATTENTION_CPU_INSTRUCTION_SETS_H_

#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/backend.h"
#include "attention/cpu/kernels.h"

namespace rapt::cpu {

// Best first, the portable baseline last. Asked of the machine once.
absl::Span<const InstructionSet> InstructionSets();

// `isa` is one of InstructionSets() that is available.
const KernelTable& Kernels(absl::string_view isa);

}  // namespace rapt::cpu

#endif  // RAPT_ATTENTION_CPU_INSTRUCTION_SETS_H_
