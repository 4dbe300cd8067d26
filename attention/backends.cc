#include "absl/strings/str_cat.h"
#include "attention/backend.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/reference/reference_backend.h"
#ifdef RAPT_HAS_CUDNN
#include "attention/cudnn/cudnn_backend.h"
#endif

namespace rapt {

std::string NamesOf(const Routing& routing) {
  if (routing.stand_in == nullptr) return std::string(routing.backend->name());
  return absl::StrCat(routing.backend->name(), "+", routing.stand_in->name());
}

absl::Span<const Backend* const> Backends() {
  static const Backend* const kBackends[] = {
#ifdef RAPT_HAS_CUDNN
      &cudnn::ProcessBackend(),
#endif
      &CpuBackend(),
      &ReferenceBackend(),
  };
  return kBackends;
}

}  // namespace rapt
