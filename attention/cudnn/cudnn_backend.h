// Attention on an NVIDIA GPU by cuDNN.
#ifndef RAPT_ATTENTION_CUDNN_CUDNN_BACKEND_H_
#define RAPT_ATTENTION_CUDNN_CUDNN_BACKEND_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/backend.h"
#include "attention/cudnn/cost_model.h"
#include "attention/cudnn/device.h"
#include "attention/cudnn/lanes.h"
#include "attention/cudnn/page_pool.h"
#include "attention/cudnn/paged_attention.h"
#include "attention/cudnn/pieces.h"
#include "attention/cudnn/plan_cache.h"
#include "attention/cudnn/staging.h"
#include "base/clock.h"
#include "base/metric_sink.h"

namespace rapt::cudnn {

struct BackendOptions {
  // "auto" leaves smaller problems to the next backend; absent: Measure() decides.
  std::optional<double> min_flops = 0;
  std::string plan_directory;  // where compiled plans are stored; empty: nowhere
};

// Attention on a device. Tasks run on one thread per lane, worker n on lane n: each packs a piece
// of the request into the lane's memory, runs it and unpacks the outputs. If a head exceeds a
// lane's memory, its keys are streamed piece by piece and the results merged. If the device cannot
// compute a piece (FallbackReason), `fallback` computes it on the same worker. Thread-safe like
// every backend; a lane has one worker at a time if all plans run under one executor.
class CudnnBackend final : public Backend {
 public:
  // Unavailable until Start().
  CudnnBackend() = default;

  // Starts with a device, or with the error of opening it. REQUIRES: no other thread uses this yet;
  // `fallback` and `clock` live until Stop().
  void Start(absl::StatusOr<std::unique_ptr<Device>> device, const Backend& fallback,
             const Clock& clock, BackendOptions options);
  // Queues kernels for compilation: those of these problems and of shorter ones that round up to
  // them, in this order, then those that Measure() needs. Returns at once. Returns Unimplemented
  // with the problem's number and the reason, and compiles nothing, if one is not supported.
  // REQUIRES: called once, after a Start() with a device.
  absl::Status Warm(absl::Span<const Problem> problems);
  // Returns whether Measure() decides what "auto" sends to the device.
  bool measures() const { return available_.ok() && !options_.min_flops; }
  // Measures the device and the fallback on `threads` for a second or two, during which the machine
  // should be idle, and logs the results. Until it succeeds, problems of at least 1e10 operations
  // go to the device. Returns Cancelled once `go_on` returns false, Unavailable if the device fails
  // or has no kernels. REQUIRES: called once.
  absl::Status Measure(int threads, absl::FunctionRef<bool()> go_on);

  // Estimated seconds of a supported, non-empty problem; nullopt before Measure().
  struct Estimate {
    double device = 0;
    double fallback = 0;
  };
  std::optional<Estimate> EstimateOf(const Problem& problem) const;

  // Waits for the current compilation and releases the device. REQUIRES: no other thread uses this.
  void Stop();

  // The progress of Warm()'s kernels. Thread-safe after Warm().
  PlanCache::Counts warmth() const;

  // For metrics; all 0 without a device. Thread-safe between Start() and Stop().
  struct State {
    bool healthy = false;  // not in backoff
    int64_t lanes = 0;
    int64_t busy_lanes = 0;
    int64_t memory_bytes = 0;
    int64_t used_memory_bytes = 0;  // by pieces on lanes and their kernels' workspace
    PlanCache::Counts plans;
    std::array<int64_t, kFallbackReasons> fallback_pieces{};  // pieces that the fallback computed
    PagePool::Counts pages;
  };
  State state() const;
  void ExportTo(MetricSink& sink) const;

  // Null without a device.
  Device* device() const { return device_.get(); }

  absl::string_view name() const override { return "cudnn"; }
  absl::Status Available() const override { return available_; }
  int lanes() const override { return device_ == nullptr ? 0 : device_->lanes(); }
  // Only ragged() computes on pages, by copies of them.
  bool Reads(Source source) const override { return source != Source::kPaged; }
  const RaggedDevice* ragged() const override { return paged_.get(); }
  absl::Status Supports(const Problem& problem) const override;
  absl::Status Prefers(const Problem& problem) const override;
  void Prepare(const Problem& problem) const override;
  void PlanTasks(Plan& plan) const override;
  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int stage,
               int64_t task, int worker, const Checkpoint& checkpoint) const override;
  // One run over ragged tensors. Does nothing if its kernels are not compiled.
  void RunBatch(absl::Span<BatchMember> members, int worker) const override;

 private:
  static absl::Status NotStarted() {
    return absl::FailedPreconditionError("no device has been opened");
  }

  std::optional<Estimate> EstimateOf(const Work& on_device, const Work& on_host) const;
  // Returns OK, or why "auto" should choose the next backend, given the work on either.
  absl::Status CheckOffload(const Work& on_device, const Work& on_host) const;
  DeviceSamples SamplesForLanes() const;
  Work WorkOnHost(const Problem& problem) const;
  // Returns the problem's work on the device, given its work on the host.
  Work WorkOnDevice(const Problem& problem, Work work) const;
  // Absent if the problem is too large to be batched or has no ragged kernels.
  std::optional<BatchGroup> BatchGroupOf(const Plan& plan) const;
  // Returns the graphs of all pieces.
  std::vector<SdpaGraph> GraphsOf(const Problem& problem) const;
  // The same over ragged tensors, alone and in batches of all sizes.
  std::vector<SdpaGraph> RaggedGraphsOf(const Problem& problem) const;
  void RunSplitHead(const Problem& problem, const Partition& partition, int64_t task,
                    const Arguments& arguments, std::byte* workspace, int worker,
                    const Checkpoint& checkpoint) const;
  void RunPiece(const Problem& piece, const Arguments& arguments, std::byte* workspace, int worker,
                const Checkpoint& checkpoint) const;
  absl::Status MeasureCosts(int threads, absl::FunctionRef<bool()> go_on);
  // Returns nullopt, or why the device did not compute the problem.
  std::optional<FallbackReason> RunOnLane(const Problem& problem, const Arguments& arguments,
                                          int worker) const;
  // Chooses ragged tensors if they are much smaller than padded ones and their kernels are ready.
  SdpaGraph GraphFor(const Part& part) const;
  // The same for each part.
  std::vector<std::optional<FallbackReason>> RunGraph(const SdpaGraph& graph,
                                                      const CompiledPlan& plan,
                                                      absl::Span<const Part> parts,
                                                      int worker) const;
  // A plan for one worker.
  Plan FallbackPlan(const Problem& problem) const;
  void RunFallback(const Problem& problem, const Arguments& arguments, std::byte* workspace,
                   const Checkpoint& checkpoint) const;

  absl::Status available_ = NotStarted();
  BackendOptions options_;
  const Backend* fallback_ = nullptr;
  const Clock* clock_ = nullptr;
  std::unique_ptr<Device> device_;
  std::unique_ptr<PagePool> pages_;  // null if the device has no memory for them
  std::unique_ptr<Lanes> lanes_;
  std::unique_ptr<PlanCache> plans_;
  std::unique_ptr<PagedAttention> paged_;  // likewise
  std::vector<SdpaGraph> warm_;            // without duplicates
  std::unique_ptr<const CostModel> measured_;
  std::atomic<const CostModel*> costs_{nullptr};  // set by Measure()
  std::atomic<bool> measuring_{false};
  mutable FallbackPieces fallback_pieces_{};
};

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_CUDNN_BACKEND_H_
