// Compiled plans by graph: each is compiled once, however many ask for it, and kept on disk.
// Callers choose the graphs: what is held in memory, and what waits for the compiler, is bounded.
#ifndef RAPT_ATTENTION_CUDNN_PLAN_CACHE_H_
#define RAPT_ATTENTION_CUDNN_PLAN_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "attention/cudnn/device.h"
#include "attention/cudnn/graph.h"
#include "base/mutex.h"

namespace rapt::cudnn {

using CompiledPlanPtr = std::shared_ptr<const CompiledPlan>;

// Thread-safe. One thread of its own compiles, so that requests are not starved of cores; those
// plans that the directory has are read instead. What can't be read or written is compiled again.
class PlanCache {
 public:
  struct Limits {
    size_t plans = 512;   // of about 100 KB; beyond, those go that nobody has asked for the longest
    size_t waiting = 64;  // for the compiler: a minute's work
  };

  // `directory` exists, or is empty: nothing is kept then. The device outlives the cache.
  PlanCache(Device& device, std::string directory) : PlanCache(device, directory, Limits()) {}
  PlanCache(Device& device, std::string directory, Limits limits);
  ~PlanCache();
  PlanCache(const PlanCache&) = delete;
  PlanCache& operator=(const PlanCache&) = delete;

  // The plan, or why the device has none for this graph. Unavailable where it is not compiled yet.
  absl::StatusOr<CompiledPlanPtr> Look(const SdpaGraph& graph);

  // The same, and where nobody has asked before has it compiled, unless too many wait for that.
  absl::StatusOr<CompiledPlanPtr> Find(const SdpaGraph& graph);

  // The same, but waits for it. Unavailable only when the cache is on its end.
  absl::StatusOr<CompiledPlanPtr> Get(const SdpaGraph& graph);

  // Has it compiled, and keeps it, beside those that the limits are for.
  void Keep(const SdpaGraph& graph);

  struct Counts {
    int64_t ready = 0;
    int64_t compiling = 0;  // or waiting for it
    int64_t declined = 0;

    void Add(const absl::Status& plan);  // with Find()'s status
  };
  // Of those that it holds or compiles.
  Counts Count() const;

 private:
  struct Entry {
    absl::StatusOr<CompiledPlanPtr> plan;
    bool kept = false;
    uint64_t last_use = 0;  // which of all uses
  };
  using Entries = std::map<std::string, Entry>;

  absl::StatusOr<CompiledPlanPtr> Ask(const SdpaGraph& graph) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<CompiledPlanPtr> Use(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Entry& Want(const SdpaGraph& graph) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void MakeRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void CompileLoop();
  absl::StatusOr<CompiledPlanPtr> Make(const SdpaGraph& graph) const;
  std::string PathOf(const std::string& key) const;

  Device& device_;
  const std::string directory_;
  const Limits limits_;

  mutable Mutex mutex_;
  CondVar changed_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  Entries entries_ ABSL_GUARDED_BY(mutex_);
  size_t kept_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<SdpaGraph> wanted_ ABSL_GUARDED_BY(mutex_);
  std::thread compiler_;
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_PLAN_CACHE_H_
