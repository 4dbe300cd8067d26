#include "server/attention/backend.h"
#include "server/attention/cpu/cpu_backend.h"
#include "server/attention/reference/reference_backend.h"
#ifdef RAPT_HAS_CUDNN
#include "server/attention/cudnn/cudnn_backend.h"
#endif

namespace rapt {

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
