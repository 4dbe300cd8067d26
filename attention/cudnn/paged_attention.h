// Ragged attention over pages of keys and values whose copies stay in a device's memory.
#ifndef RAPT_ATTENTION_CUDNN_PAGED_ATTENTION_H_
#define RAPT_ATTENTION_CUDNN_PAGED_ATTENTION_H_

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "attention/backend.h"
#include "attention/cudnn/cost_model.h"
#include "attention/cudnn/graph.h"
#include "attention/cudnn/lanes.h"
#include "attention/cudnn/page_pool.h"
#include "attention/cudnn/paged_staging.h"
#include "attention/cudnn/plan_cache.h"
#include "attention/mechanism/softmax/ragged_device.h"

namespace rapt::cudnn {

// The items of a call are computed by a few runs, each of items with similar numbers of rows. A run
// first copies the rows of pages that the device lacks; keys and values that an earlier run copied
// are not moved again. If the device cannot compute a run, the fallback computes its items from the
// pages in host memory, which stay the only truth. Thread-safe.
class PagedAttention final : public RaggedDevice {
 public:
  // Returns OK, or why the next backend should be chosen, given the work on either.
  using Chooser = std::function<absl::Status(const Work& on_device, const Work& on_host)>;

  // REQUIRES: all arguments outlive this.
  PagedAttention(Lanes& lanes, PlanCache& plans, PagePool& pages, const Backend& fallback,
                 FallbackPieces& fallback_pieces, Chooser check_offload)
      : lanes_(lanes),
        plans_(plans),
        pages_(pages),
        fallback_(fallback),
        fallback_pieces_(fallback_pieces),
        check_offload_(std::move(check_offload)) {}

  absl::Status Supports(const RaggedCall& call) const override;
  // Assumes that the device has copies of all pages.
  absl::Status Prefers(const RaggedCall& call) const override;
  void Prepare(const RaggedCall& call) const override;
  void PlanTasks(const RaggedCall& call, const RaggedSource& source, Plan& plan) const override;
  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int64_t task,
               int worker, const Checkpoint& checkpoint) const override;

 private:
  struct Batch {
    SdpaGraph graph;
    std::vector<PagedItem> items;
  };
  class Run;
  class PagedPlan;

  // Divides the items that have rows into runs. REQUIRES: graph.h supports the call.
  std::vector<Batch> BatchesOf(const RaggedCall& call) const;
  GraphPages PagesFor(const RaggedCall& call) const;
  // Returns nullopt, or why the device did not compute the run.
  std::optional<FallbackReason> RunOnLane(const Run& run, const Arguments& arguments,
                                          int worker) const;

  Lanes& lanes_;
  PlanCache& plans_;
  PagePool& pages_;
  const Backend& fallback_;
  FallbackPieces& fallback_pieces_;
  const Chooser check_offload_;
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_PAGED_ATTENTION_H_
