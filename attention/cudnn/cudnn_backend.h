// Attention on an NVIDIA GPU by cuDNN.
#ifndef RAPT_ATTENTION_CUDNN_CUDNN_BACKEND_H_
#define RAPT_ATTENTION_CUDNN_CUDNN_BACKEND_H_

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/backend.h"
#include "attention/cudnn/cost_model.h"
#include "attention/cudnn/device.h"
#include "attention/cudnn/pieces.h"
#include "attention/cudnn/plan_cache.h"
#include "attention/cudnn/staging.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace rapt::cudnn {

struct BackendOptions {
  // Smaller problems are left to the next backend by "auto"; absent: what Measure() finds decides.
  std::optional<double> least_flops = 0;
  std::string plan_directory;  // where plans are kept; empty: nowhere
};

// Why another backend computes a piece in the device's place.
enum class StandInReason : uint8_t {
  kDevice,   // it has failed, on this piece or before
  kNumbers,  // such as it can't be trusted with, see StageInputs()
  kKernels,  // cuDNN has none
  kMemory,   // they take more than the lane has left
};
inline constexpr size_t kStandInReasons = 4;
absl::string_view NameOf(StandInReason reason);

// Whether the device can be relied on: not for a while after an error, a longer one after each that
// follows. Thread-safe.
class DeviceHealth {
 public:
  static constexpr std::chrono::seconds kFirstPause{1};
  static constexpr std::chrono::seconds kLongestPause{60};

  DeviceHealth(Device& device, const Clock& clock) : device_(device), clock_(clock) {}

  // Whether it is worth sending something there now.
  bool promising() const;

  // Lanes between Enter() and Leave().
  int running() const;

  // Before a lane is used. False while the device pauses; when the pause is over the first to come
  // restarts the device, others wait for it.
  bool Enter();
  // After it, with what its run said; nothing where the device was not asked after all.
  void Leave(const std::optional<absl::Status>& run);

 private:
  void RestartDevice() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Pause() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  Device& device_;
  const Clock& clock_;
  mutable Mutex mutex_;
  CondVar changed_;
  bool failed_ ABSL_GUARDED_BY(mutex_) = false;
  bool restarting_ ABSL_GUARDED_BY(mutex_) = false;
  int running_ ABSL_GUARDED_BY(mutex_) = 0;  // lanes
  std::chrono::nanoseconds pause_ ABSL_GUARDED_BY(mutex_){0};
  Instant paused_until_ ABSL_GUARDED_BY(mutex_);
};

// Attention on a device. Tasks run on as many threads as the device has lanes, worker n on lane n:
// each packs a piece of the request into the lane's memory, has the lane compute it, and takes the
// outputs out; where a head is more than a lane's memory, it streams the keys there piece by piece
// and folds the results. A piece that the device fails on, or whose numbers are none for it, is
// computed by `fallback`, on that worker alone. Thread-safe as every backend; a lane has one worker
// at a time as long as plans run under one executor.
class CudnnBackend final : public Backend {
 public:
  // Available from Start() on.
  CudnnBackend() = default;

  // Before other threads use it; with a device, or why there is none. What is borrowed lives until
  // Stop().
  void Start(absl::StatusOr<std::unique_ptr<Device>> device, const Backend& fallback,
             const Clock& clock, BackendOptions options);
  // Has the kernels of such problems compiled, in that order, and of those whose lengths round up
  // to theirs, and of what Measure() runs; returns at once. Unimplemented, with the problem's
  // number and the reason, where one of them can't be computed; none is compiled then. Call it
  // once, after a Start() with a device.
  absl::Status Warm(absl::Span<const Problem> problems);
  // Whether it is left to Measure() what "auto" sends to the device.
  bool measures() const { return available_.ok() && !options_.least_flops; }
  // Measures device and fallback, which runs on `threads`, for a second or two in which the machine
  // has nothing else to do, and logs what it finds. Until then, and where it fails, what has 1e10
  // operations goes to the device. Cancelled once `go_on` says no; Unavailable where the device
  // fails or has no kernels. Call it once.
  absl::Status Measure(int threads, absl::FunctionRef<bool()> go_on);

  // What a supported problem that is not empty takes, in seconds; absent before Measure().
  struct Estimate {
    double device = 0;
    double fallback = 0;
  };
  std::optional<Estimate> EstimateOf(const Problem& problem) const;

  // When none does any more: waits for what is being compiled and lets go of the device.
  void Stop();

  // How far Warm()'s kernels are. Thread-safe after Warm().
  PlanCache::Counts warmth() const;

  // For metrics: all is 0 without a device. Thread-safe between Start() and Stop().
  struct State {
    bool healthy = false;  // it can be relied on, as far as is known
    int64_t lanes = 0;
    int64_t busy_lanes = 0;  // that have a piece
    int64_t memory_bytes = 0;
    int64_t used_memory_bytes = 0;  // of pieces that lanes have, and their kernels' workspace
    PlanCache::Counts plans;
    std::array<int64_t, kStandInReasons> stand_ins{};  // pieces that another backend computed
  };
  State state() const;

  // Null where there is none.
  Device* device() const { return device_.get(); }

  absl::string_view name() const override { return "cudnn"; }
  absl::Status Available() const override { return available_; }
  int lanes() const override { return device_ == nullptr ? 0 : device_->lanes(); }
  bool ReadsSlices() const override { return true; }
  absl::Status Supports(const Problem& problem) const override;
  absl::Status Prefers(const Problem& problem) const override;
  void Prepare(const Problem& problem) const override;
  void PlanTasks(Plan& plan) const override;
  void RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace, int stage,
               int64_t task, int worker, const Checkpoint& checkpoint) const override;
  // In one run over ragged tensors, where its kernels are there.
  void RunTogether(absl::Span<Member> members, int worker) const override;

 private:
  static absl::Status NotStarted() {
    return absl::FailedPreconditionError("no device has been opened");
  }

  absl::Status IsWorthTheWay(const Problem& problem) const;
  DeviceSamples SamplesForTheLanes() const;
  Work WorkOnHost(const Problem& problem) const;
  // What is `work` on the host.
  Work WorkOnDevice(const Problem& problem, Work work) const;
  // With whom it may share a run, if it is small enough for it.
  void SetCompany(Plan& plan) const;
  // What its pieces are computed by.
  std::vector<SdpaGraph> GraphsOf(const Problem& problem) const;
  // The same over ragged tensors: by its own lengths, and with all the company that it may have.
  std::vector<SdpaGraph> RaggedGraphsOf(const Problem& problem) const;
  void RunParted(const Problem& whole, const Cut& cut, int64_t run, const Arguments& arguments,
                 std::byte* workspace, int worker, const Checkpoint& checkpoint) const;
  void RunPiece(const Problem& piece, const Arguments& arguments, std::byte* workspace, int worker,
                const Checkpoint& checkpoint) const;
  // Why it did not, if it did not.
  using NotDone = std::optional<StandInReason>;
  absl::Status MeasureCosts(int threads, absl::FunctionRef<bool()> go_on);
  NotDone RunOnLane(const Problem& problem, const Arguments& arguments, int worker) const;
  // Over padded tensors, or where that sends much less and the kernels are there, ragged ones.
  SdpaGraph GraphFor(const Part& part) const;
  // Of each part why its outputs are not there, if they are not.
  std::vector<NotDone> RunGraph(const SdpaGraph& graph, const CompiledPlan& plan,
                                absl::Span<const Part> parts, int worker) const;
  // For one worker.
  Plan FallbackPlan(const Problem& problem) const;
  void RunFallback(const Problem& problem, const Arguments& arguments, std::byte* workspace,
                   const Checkpoint& checkpoint) const;

  absl::Status available_ = NotStarted();
  BackendOptions options_;
  const Backend* fallback_ = nullptr;
  const Clock* clock_ = nullptr;
  std::unique_ptr<Device> device_;
  std::unique_ptr<DeviceHealth> health_;
  std::unique_ptr<PlanCache> plans_;
  std::vector<SdpaGraph> warm_;  // not the same twice
  std::unique_ptr<const CostModel> measured_;
  std::atomic<const CostModel*> costs_{nullptr};  // once it is measured
  std::atomic<bool> measuring_{false};
  std::unique_ptr<Mutex[]> lane_mutexes_;
  mutable std::atomic<int64_t> used_bytes_{0};
  mutable std::array<std::atomic<int64_t>, kStandInReasons> stand_ins_{};
};

// The one of Backends().
CudnnBackend& ProcessBackend();

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_CUDNN_BACKEND_H_
