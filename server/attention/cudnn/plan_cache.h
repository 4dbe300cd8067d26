// Compiled plans by graph: each is compiled once, however many ask for it, and kept on disk.
#ifndef RAPT_SERVER_ATTENTION_CUDNN_PLAN_CACHE_H_
#define RAPT_SERVER_ATTENTION_CUDNN_PLAN_CACHE_H_

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "server/attention/cudnn/device.h"
#include "server/attention/cudnn/graph.h"
#include "server/base/mutex.h"

namespace rapt::cudnn {

using CompiledPlanPtr = std::shared_ptr<const CompiledPlan>;

// Thread-safe. One thread of its own compiles, so that requests are not starved of cores; those
// plans that the directory has are read instead. What can't be read or written is compiled again.
class PlanCache {
 public:
  // `directory` exists, or is empty: nothing is kept then. The device outlives the cache.
  PlanCache(Device& device, std::string directory);
  ~PlanCache();
  PlanCache(const PlanCache&) = delete;
  PlanCache& operator=(const PlanCache&) = delete;

  // The plan, or why the device has none for this graph. Unavailable while it is being compiled,
  // which the first call starts.
  absl::StatusOr<CompiledPlanPtr> Find(const SdpaGraph& graph);

  // The same, but waits for it. Unavailable only when the cache is on its end.
  absl::StatusOr<CompiledPlanPtr> Get(const SdpaGraph& graph);

  struct Counts {
    int64_t ready = 0;
    int64_t compiling = 0;  // or waiting for it
    int64_t declined = 0;

    void Add(const absl::Status& plan);  // with Find()'s status
  };
  // Of all graphs that were asked for.
  Counts Count() const;

 private:
  using Entries = std::map<std::string, absl::StatusOr<CompiledPlanPtr>>;

  const absl::StatusOr<CompiledPlanPtr>& Ask(const SdpaGraph& graph)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CompileLoop();
  absl::StatusOr<CompiledPlanPtr> Make(const SdpaGraph& graph) const;
  std::string PathOf(const std::string& key) const;

  Device& device_;
  const std::string directory_;

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Entries entries_ ABSL_GUARDED_BY(mutex_);  // never taken out again: references stay
  std::deque<SdpaGraph> wanted_ ABSL_GUARDED_BY(mutex_);
  std::thread compiler_;
};

}  // namespace rapt::cudnn

#endif  // RAPT_SERVER_ATTENTION_CUDNN_PLAN_CACHE_H_
