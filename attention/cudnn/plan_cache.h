// Compiled plans by graph. Each is compiled once, regardless of the number of requests, and stored
// on disk. Requests determine the graphs, so the cache and the compile queue are bounded.
#ifndef RAPT_ATTENTION_CUDNN_PLAN_CACHE_H_
#define RAPT_ATTENTION_CUDNN_PLAN_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "attention/cudnn/device.h"
#include "attention/cudnn/graph.h"
#include "base/mutex.h"

namespace rapt::cudnn {

using CompiledPlanPtr = std::shared_ptr<const CompiledPlan>;

// Thread-safe. Compiles on a single dedicated thread, so that requests are not starved of cores.
// Plans found in the directory are read instead; unreadable files are ignored.
class PlanCache {
 public:
  struct Limits {
    size_t plans = 512;   // about 100 KB each; the least recently used is evicted
    size_t waiting = 64;  // in the compile queue: a minute's work
  };

  // An empty `directory` stores nothing. REQUIRES: `directory` exists; the device outlives the
  // cache.
  PlanCache(Device& device, std::string directory)
      : PlanCache(device, std::move(directory), Limits()) {}
  PlanCache(Device& device, std::string directory, Limits limits);
  ~PlanCache();
  PlanCache(const PlanCache&) = delete;
  PlanCache& operator=(const PlanCache&) = delete;

  // Returns the plan, or why the device has none for the graph; Unavailable if not compiled yet.
  absl::StatusOr<CompiledPlanPtr> Peek(const SdpaGraph& graph);

  // The same, and queues the graph for compiling if it is new, unless the queue is full.
  absl::StatusOr<CompiledPlanPtr> Find(const SdpaGraph& graph);

  // The same, but waits for the plan. Unavailable only while the cache is being destroyed.
  absl::StatusOr<CompiledPlanPtr> Get(const SdpaGraph& graph);

  // Compiles the plan and never evicts it. Pinned plans do not count towards the limits.
  void Pin(const SdpaGraph& graph);

  struct Counts {
    int64_t ready = 0;
    int64_t compiling = 0;  // or queued
    int64_t declined = 0;

    void Add(const absl::Status& plan);  // the status of Peek()
  };
  // Counts the plans held or being compiled.
  Counts Count() const;

 private:
  struct Entry {
    absl::StatusOr<CompiledPlanPtr> plan;
    bool pinned = false;
    uint64_t last_use = 0;  // value of uses_
  };
  using Entries = std::map<std::string, Entry>;

  absl::StatusOr<CompiledPlanPtr> FindOrEnqueue(const SdpaGraph& graph)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<CompiledPlanPtr> Use(Entry& entry) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Entry& Enqueue(const SdpaGraph& graph) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EvictIfFull() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
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
  size_t pinned_ ABSL_GUARDED_BY(mutex_) = 0;
  uint64_t uses_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<SdpaGraph> queue_ ABSL_GUARDED_BY(mutex_);
  std::thread compiler_;
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_PLAN_CACHE_H_
