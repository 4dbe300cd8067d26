#include "absl/strings/str_cat.h"
#include "attention/backend.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/reference/reference_backend.h"
#ifdef RAPT_HAS_CUDNN
#include "attention/cudnn/cudnn_backend.h"
#endif

namespace rapt {

std::string NamesOf(const Backend& backend, const Backend* stand_in) {
  if (stand_in == nullptr) return std::string(backend.name());
  return absl::StrCat(backend.name(), "+", stand_in->name());
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
