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
    {"amx", &cpu::kAmxProjectionKernels},
    {"avx512_bf16", &cpu::kAvx512Bf16ProjectionKernels},
    {"avx512", &cpu::kAvx512ProjectionKernels},
    {"avx2", &cpu::kAvx2ProjectionKernels},
    {"portable", &cpu::kPortableProjectionKernels},
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
