#include "server/attention/cudnn/cudnn_backend.h"

#include <algorithm>
#include <array>
#include <set>
#include <utility>

#include "absl/strings/str_cat.h"
#include "server/attention/attention.h"
#include "server/attention/cudnn/graph.h"
#include "server/attention/cudnn/pieces.h"
#include "server/attention/cudnn/staging.h"
#include "server/attention/present.h"
#include "server/base/aligned_buffer.h"
#include "server/base/log.h"

namespace rapt::cudnn {
namespace {

// Of a lane's memory, what kernels may take as their workspace.
constexpr int64_t kWorkspaceShare = 8;

int64_t TensorBytes(const Device& device) {
  return device.arena_bytes() - device.arena_bytes() / kWorkspaceShare;
}

Cut CutOn(const Device& device, const Problem& problem) {
  return CutFor(problem, TensorBytes(device), device.lanes());
}

int64_t RoundUp(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// All but the last piece are as large as the first.
std::array<Problem, 2> KindsOfPieces(const Problem& problem, const Cut& cut) {
  return {ProblemOf(problem, cut.piece(problem, 0)),
          ProblemOf(problem, cut.piece(problem, cut.pieces(problem) - 1))};
}

}  // namespace

// --- DeviceHealth --------------------------------------------------------------------------------

bool DeviceHealth::promising() const {
  MutexLock lock(mutex_);
  return !failed_ || (!restarting_ && clock_.Now() >= paused_until_);
}

bool DeviceHealth::Enter() {
  MutexLock lock(mutex_);
  while (failed_) {
    if (clock_.Now() < paused_until_) return false;
    if (running_ > 0 || restarting_) {
      changed_.Wait(mutex_);
    } else {
      RestartDevice();
    }
  }
  ++running_;
  return true;
}

void DeviceHealth::Leave(const absl::Status& status) {
  MutexLock lock(mutex_);
  --running_;
  if (status.ok()) {
    if (!failed_) pause_ = std::chrono::nanoseconds(0);
  } else if (!failed_) {
    failed_ = true;
    Pause();
    Log(LogLevel::kWarning, "the device failed",
        {{"error", status.message()},
         {"pause_ms", std::chrono::duration_cast<std::chrono::milliseconds>(pause_).count()}});
  }
  changed_.SignalAll();
}

void DeviceHealth::RestartDevice() {
  restarting_ = true;
  mutex_.Unlock();  // it takes a while, and requests that are planned look at the health
  const absl::Status status = device_.Restart();
  mutex_.Lock();
  restarting_ = false;
  failed_ = !status.ok();
  if (failed_) Pause();
  Log(failed_ ? LogLevel::kWarning : LogLevel::kInfo, "the device was restarted",
      {{"error", status.message()}});
  changed_.SignalAll();
}

void DeviceHealth::Pause() {
  pause_ = std::clamp<std::chrono::nanoseconds>(2 * pause_, kFirstPause, kLongestPause);
  paused_until_ = clock_.Now() + pause_;
}

// --- CudnnBackend --------------------------------------------------------------------------------

void CudnnBackend::Start(absl::StatusOr<std::unique_ptr<Device>> device, const Backend& fallback,
                         const Clock& clock, BackendOptions options) {
  available_ = device.status();
  if (!device.ok()) return;
  fallback_ = &fallback;
  options_ = std::move(options);
  device_ = *std::move(device);
  health_ = std::make_unique<DeviceHealth>(*device_, clock);
  plans_ = std::make_unique<PlanCache>(*device_, options_.plan_directory);
}

absl::Status CudnnBackend::Warm(absl::Span<const Problem> problems) {
  std::set<std::string> keys;
  for (size_t n = 0; n < problems.size(); ++n) {
    if (absl::Status status = Supports(problems[n]); !status.ok()) {
      return absl::Status(status.code(), absl::StrCat("shape ", n + 1, ": ", status.message()));
    }
    for (SdpaGraph graph : GraphsOf(problems[n])) {
      if (keys.insert(graph.Key()).second) warm_.push_back(graph);
      graph.has_lengths = true;  // of those shorter ones that round up to it
      if (keys.insert(graph.Key()).second) warm_.push_back(graph);
    }
  }
  for (const SdpaGraph& graph : warm_) plans_->Find(graph).IgnoreError();
  return absl::OkStatus();
}

CudnnBackend::Warmth CudnnBackend::warmth() const {
  Warmth warmth;
  for (const SdpaGraph& graph : warm_) {
    const absl::Status status = plans_->Find(graph).status();
    ++(status.ok()                   ? warmth.ready
       : absl::IsUnavailable(status) ? warmth.compiling
                                     : warmth.declined);
  }
  return warmth;
}

void CudnnBackend::Stop() {
  available_ = NotStarted();
  warm_.clear();
  plans_.reset();
  health_.reset();
  device_.reset();
}

absl::Status CudnnBackend::Supports(const Problem& problem) const {
  absl::Status status = cudnn::Supports(problem);
  if (!status.ok() || problem.empty()) return status;
  if (CutOn(*device_, problem).batch == 0) {
    return absl::UnimplementedError(absl::StrCat("a single head takes more than the ",
                                                 TensorBytes(*device_),
                                                 " bytes that a lane of the device has"));
  }
  return absl::OkStatus();
}

absl::Status CudnnBackend::Prefers(const Problem& problem) const {
  if (const double flops = FallbackPlan(problem).flops; flops < options_.least_flops) {
    return absl::OutOfRangeError(absl::StrCat("its ", flops, " operations are less than the ",
                                              options_.least_flops, " that are worth the way"));
  }
  if (problem.empty()) return absl::OutOfRangeError("there is nothing to compute");
  if (!health_->promising()) return absl::UnavailableError("the device has failed and rests");
  for (const SdpaGraph& graph : GraphsOf(problem)) {
    const absl::StatusOr<CompiledPlanPtr> plan = plans_->Find(graph);
    if (!plan.ok()) return plan.status();
  }
  return absl::OkStatus();
}

std::vector<SdpaGraph> CudnnBackend::GraphsOf(const Problem& problem) const {
  std::vector<SdpaGraph> graphs;
  if (problem.empty()) return graphs;
  for (const Problem& piece : KindsOfPieces(problem, CutOn(*device_, problem))) {
    if (!CropOf(piece).empty()) graphs.push_back(GraphOf(piece));
  }
  return graphs;
}

void CudnnBackend::PlanTasks(Plan& plan) const {
  const Problem& p = plan.problem;
  plan.stages = {PresentTasks(p)};
  if (p.empty()) return;
  const Cut cut = CutOn(*device_, p);
  plan.stages[0] += cut.pieces(p);
  for (const Problem& piece : KindsOfPieces(p, cut)) {
    plan.worker_workspace_bytes =
        std::max(plan.worker_workspace_bytes, FallbackPlan(piece).workspace_bytes());
  }
  plan.worker_workspace_bytes = RoundUp(plan.worker_workspace_bytes, AlignedBuffer::kAlignment);
  plan.flops = FallbackPlan(p).flops;
}

void CudnnBackend::RunTask(const Plan& plan, const Arguments& arguments, std::byte* workspace,
                           int /*stage*/, int64_t task, int worker,
                           const Checkpoint& checkpoint) const {
  const Problem& whole = plan.problem;
  if (task < PresentTasks(whole)) return RunPresentTask(whole, arguments, task);
  const Piece piece = CutOn(*device_, whole).piece(whole, task - PresentTasks(whole));
  const Problem problem = ProblemOf(whole, piece);
  const PieceArguments part(arguments, whole, piece);
  if (RunOnLane(problem, part.arguments(), device_->lane(worker))) return;
  RunFallback(problem, part.arguments(), workspace + worker * plan.worker_workspace_bytes,
              checkpoint);
}

bool CudnnBackend::RunOnLane(const Problem& problem, const Arguments& arguments, Lane& lane) const {
  if (CropOf(problem).empty()) {
    TakeOutputs(problem, {}, {}, arguments, nullptr);  // no row sees a key
    return true;
  }
  const SdpaGraph graph = GraphOf(problem);
  const absl::StatusOr<CompiledPlanPtr> plan = plans_->Get(graph);
  if (!plan.ok()) return false;
  const ArenaLayout layout = LayOut(graph);
  if (layout.end + (*plan)->workspace_bytes > device_->arena_bytes()) return false;
  if (!health_->Enter()) return false;  // from here on the lane's memory is its own
  const bool staged = StageInputs(problem, graph, layout, arguments, lane.host().data());
  const absl::Status status = staged ? lane.Run(graph, **plan, layout) : absl::OkStatus();
  const bool done = staged && status.ok();
  if (done) TakeOutputs(problem, graph, layout, arguments, lane.host().data());
  health_->Leave(status);
  return done;
}

Plan CudnnBackend::FallbackPlan(const Problem& problem) const {
  Plan plan;
  plan.problem = problem;
  plan.backend = fallback_;
  plan.isa = ChooseIsa(*fallback_, "auto");
  if (!problem.empty()) fallback_->PlanTasks(plan);
  return plan;
}

void CudnnBackend::RunFallback(const Problem& problem, const Arguments& arguments,
                               std::byte* workspace, const Checkpoint& checkpoint) const {
  const Plan plan = FallbackPlan(problem);
  for (size_t stage = 0; stage < plan.stages.size(); ++stage) {
    for (int64_t task = 0; task < plan.stages[stage]; ++task) {
      if (checkpoint.go_on != nullptr && !checkpoint.go_on(checkpoint.context)) return;
      fallback_->RunTask(plan, arguments, workspace, static_cast<int>(stage), task, /*worker=*/0,
                         checkpoint);
    }
  }
}

CudnnBackend& ProcessBackend() {
  static CudnnBackend& backend = *new CudnnBackend;  // outlives every static that asks for it
  return backend;
}

}  // namespace rapt::cudnn
