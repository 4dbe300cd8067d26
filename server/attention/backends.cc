#include "server/attention/backend.h"
#include "server/attention/cpu/cpu_backend.h"
#include "server/attention/reference/reference_backend.h"

namespace rapt {

absl::Span<const Backend* const> Backends() {
  static const Backend* const kBackends[] = {&CpuBackend(), &ReferenceBackend()};
  return kBackends;
}

}  // namespace rapt
