#include "server/readiness.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/attention.h"
#include "attention/backend.h"
#include "attention/half.h"
#include "base/log.h"

namespace rapt {
namespace {

constexpr int64_t kHeads = 2, kLength = 64, kSize = 64;
constexpr int64_t kElements = kHeads * kLength * kSize;

// Element d of every row of V. The weights sum to 1 for any Q and K, so it is also element d of
// every row of the result. Exact in all types.
double ValueOf(int64_t d) { return static_cast<double>(d) / kSize; }

// Initial output, which is wrong.
constexpr double kNotComputed = -1;

template <typename Byte>
BasicTensorView<Byte> ViewOf(Byte* data, DType dtype) {
  constexpr std::array<int64_t, 4> kDims = {1, kHeads, kLength, kSize};
  return {data, dtype, kDims, RowMajorStrides(kDims)};
}

}  // namespace

absl::StatusOr<Plan> PlanCanary(const PlanOptions& options) {
  absl::StatusOr<Plan> plan;
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    plan = MakePlan({.dtype = dtype,
                     .batch = 1,
                     .query_heads = kHeads,
                     .kv_heads = kHeads,
                     .query_length = kLength,
                     .key_length = kLength,
                     .head_size = kSize,
                     .value_head_size = kSize},
                    options);
    if (plan.ok()) break;
  }
  return plan;
}

Readiness::Readiness(Plan canary, std::chrono::nanoseconds stall_timeout, PostToWire post_to_wire,
                     Executor& executor, Timer& timer, const Clock& clock)
    : plan_(std::move(canary)),
      stall_timeout_(stall_timeout),
      interval_(std::min<std::chrono::nanoseconds>(stall_timeout / 4, kLongestInterval)),
      post_to_wire_(std::move(post_to_wire)),
      executor_(executor),
      clock_(clock),
      workspace_(static_cast<size_t>(plan_.workspace_bytes())),
      alarm_(timer, [this] { Check(); }) {
  const DType dtype = plan_.problem.dtype;
  const int64_t bytes = kElements * SizeOf(dtype);
  inputs_ = AlignedBuffer(static_cast<size_t>(3 * bytes));
  output_ = AlignedBuffer(static_cast<size_t>(bytes));
  std::byte* const query = inputs_.data();
  std::byte* const key = query + bytes;
  std::byte* const value = key + bytes;
  for (int64_t i = 0; i < kElements; ++i) {
    StoreElement(query, dtype, i, static_cast<double>(i % 3 - 1));
    StoreElement(key, dtype, i, static_cast<double>(i / kSize % 5));
    StoreElement(value, dtype, i, ValueOf(i % kSize));
  }
  arguments_.inputs[Role::kQ] = ViewOf<const std::byte>(query, dtype);
  arguments_.inputs[Role::kK] = ViewOf<const std::byte>(key, dtype);
  arguments_.inputs[Role::kV] = ViewOf<const std::byte>(value, dtype);
  arguments_.outputs[Role::kY] = ViewOf<std::byte>(output_.data(), dtype);
}

Readiness::~Readiness() {
  alarm_.Cancel();
  WaitForCanary();
}

absl::Status Readiness::Start(std::function<void(bool)> on_change) {
  on_change_ = std::move(on_change);
  SubmitCanary();
  if (WaitForCanary() == Canary::kWrong) {
    return absl::InternalError(
        absl::StrCat("plan '", plan_.Describe(), "' computes wrong results on this machine"));
  }
  computes_ = true;
  on_change_(true);
  last_check_ = clock_.Now();
  alarm_.Set(last_check_ + interval_);
  return absl::OkStatus();
}

void Readiness::Withdraw() {
  withdrawn_ = true;
  alarm_.Cancel();
}

void Readiness::ExportTo(MetricSink& sink) const {
  sink.AddGauge("rapt_ready", "1 if the server computes and accepts calls.", {},
                [this] { return is_ready(); });
}

void Readiness::SubmitCanary() {
  for (int64_t i = 0; i < kElements; ++i) {
    StoreElement(output_.data(), plan_.problem.dtype, i, kNotComputed);
  }
  {
    MutexLock lock(mutex_);
    canary_ = Canary::kOnWire;
  }
  post_to_wire_([this] { ComputeCanary(); });
}

void Readiness::ComputeCanary() {
  {
    MutexLock lock(mutex_);
    canary_ = Canary::kOnThreads;
  }
  Job job;
  job.stages = plan_.stages;
  job.run_task = [this](int stage, int64_t task, int worker, const Checkpoint& checkpoint) {
    plan_.routing.backend->RunTask(plan_, arguments_, workspace_.data(), stage, task, worker,
                                   checkpoint);
  };
  job.task_cost = plan_.task_flops();
  job.done = [this](const JobReport&) { OnCanaryDone(); };
  executor_.Submit(std::move(job));
}

void Readiness::OnCanaryDone() {
  const Canary canary = IsOutputCorrect() ? Canary::kCorrect : Canary::kWrong;
  MutexLock lock(mutex_);
  canary_ = canary;
  canary_done_.SignalAll();  // under the lock, because the waiting thread may destroy this
}

bool Readiness::IsOutputCorrect() const {
  constexpr double kTolerance = 0.5 / kSize;  // halfway to the next column
  for (int64_t i = 0; i < kElements; ++i) {
    const double y = LoadElement(output_.data(), plan_.problem.dtype, i);
    const bool is_near = std::abs(y - ValueOf(i % kSize)) < kTolerance;  // false for NaN
    if (!is_near) return false;
  }
  return true;
}

Readiness::Canary Readiness::CanaryState() const {
  MutexLock lock(mutex_);
  return canary_;
}

Readiness::Canary Readiness::WaitForCanary() const {
  MutexLock lock(mutex_);
  while (IsPending(canary_)) canary_done_.Wait(mutex_);
  return canary_;
}

void Readiness::Check() {
  const Instant now = clock_.Now();
  const Canary canary = CanaryState();
  const int64_t ended_tasks = executor_.ended_tasks();
  const bool computes = canary == Canary::kOnThreads && ended_tasks != ended_tasks_;
  if (canary != last_state_ || !IsPending(canary) || computes) {
    without_progress_ = {};
  } else {
    // A late check means that this process was stopped, not that its threads hang.
    without_progress_ += std::min<std::chrono::nanoseconds>(now - last_check_, 2 * interval_);
  }
  last_state_ = canary;
  ended_tasks_ = ended_tasks;
  last_check_ = now;

  if (!IsPending(canary)) {
    Report(canary == Canary::kCorrect, "the canary computed a wrong result");
    SubmitCanary();
  } else if (without_progress_ >= stall_timeout_) {
    Report(false, canary == Canary::kOnWire ? "the network threads make no progress"
                                            : "the compute threads make no progress");
  }
  alarm_.Set(now + interval_);
}

void Readiness::Report(bool computes, absl::string_view reason) {
  if (computes_ == computes) return;
  // First, so that the reason is in the log when a probe fails.
  if (computes) {
    Log(LogLevel::kInfo, "ready again");
  } else {
    Log(LogLevel::kError, "not ready", {{"reason", reason}});
  }
  computes_ = computes;
  on_change_(computes);
}

}  // namespace rapt
