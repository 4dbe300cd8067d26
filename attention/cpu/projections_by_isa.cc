#include "absl/strings/string_view.h"
#include "attention/cpu/projection_kernels.h"
#include "attention/layer/projection_kernels.h"
#include "base/check.h"

namespace rapt {
namespace {

struct Entry {
  absl::string_view isa;
  const ProjectionKernels* kernels;
};

constexpr Entry kEntries[] = {
#define RAPT_INSTRUCTION_SET(set, name, detected) {#set, &cpu::k##name##ProjectionKernels},
#include "attention/cpu/instruction_sets.def"
#undef RAPT_INSTRUCTION_SET
    {"", &cpu::kPortableProjectionKernels},
};

}  // namespace

const ProjectionKernels& ProjectionKernelsOf(absl::string_view isa) {
  for (const Entry& entry : kEntries) {
    if (entry.isa == isa) return *entry.kernels;
  }
  CheckFailed(__FILE__, __LINE__, "isa is known", "a plan names one that is not");
}

}  // namespace rapt
