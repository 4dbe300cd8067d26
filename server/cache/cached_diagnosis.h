// A diagnosis of attention over resident keys and values.
#ifndef RAPT_SERVER_CACHE_CACHED_DIAGNOSIS_H_
#define RAPT_SERVER_CACHE_CACHED_DIAGNOSIS_H_

#include <memory>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "attention/diagnosis.h"
#include "attention/operator.h"
#include "attention/plan.h"
#include "server/cache/cache_store.h"
#include "server/cache/cached_attention.h"
#include "server/request.h"

namespace rapt::cache {

// Diagnoses a call of one item without new tokens. It appends nothing and renews no lease. Keys and
// values are read in their pages. From Start() until the response is encoded. Not thread-safe,
// except what the request does.
class CachedDiagnosis {
 public:
  // Checks the call as CachedAttention::Start(), and returns a request that borrows this. It
  // computes the report and has no outputs. InvalidArgument for other items; FAILED_PRECONDITION
  // `evicted` if a token in front of the item's end is evicted, as all pairs are computed.
  // REQUIRES: called once; `store` outlives this.
  absl::StatusOr<Request> Start(CacheStore& store, const std::string& owner, AttendCall call);

  // REQUIRES: the request has succeeded.
  DiagnosisReport Finish(const PlanOptions& options);
  // The type and shape of a tensor of the report, as callers send them: K and V are [T, Hkv, D] and
  // [T, Hkv, Dv].
  const TensorSpec& spec(Role role) const { return *specs_[role]; }

 private:
  class Tasks;

  absl::Status Check(CacheStore& store) const;
  void SetArguments();

  CachedAttention attention_;
  std::shared_ptr<const TensorOperator> attend_;  // what is diagnosed
  std::optional<Snapshot> tokens_;
  InputMap<std::optional<TensorSpec>> specs_;
  Problem problem_;
  Arguments arguments_;
  std::optional<Diagnosis> diagnosis_;
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_CACHED_DIAGNOSIS_H_
