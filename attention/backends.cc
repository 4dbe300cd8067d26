#include "absl/strings/str_cat.h"
#include "attention/backend.h"
#include "attention/cpu/cpu_backend.h"
#include "attention/reference/reference_backend.h"

namespace rapt {

std::string NamesOf(const Routing& routing) {
  if (routing.piece_fallback == nullptr) return std::string(routing.backend->name());
  return absl::StrCat(routing.backend->name(), "+", routing.piece_fallback->name());
}

BackendSet::BackendSet(absl::Span<const Backend* const> devices)
    : backends_(devices.begin(), devices.end()) {
  backends_.push_back(&CpuBackend());
  backends_.push_back(&ReferenceBackend());
}

const BackendSet& BuiltInBackends() {
  static const BackendSet& backends = *new BackendSet;  // never destroyed
  return backends;
}

}  // namespace rapt
