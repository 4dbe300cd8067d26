// Determines whether the server can compute. All readiness interfaces query this.
#ifndef RAPT_SERVER_READINESS_H_
#define RAPT_SERVER_READINESS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "base/metric_sink.h"
#include "base/mutex.h"
#include "base/timer.h"
#include "server/execution/executor.h"

namespace rapt {

// Plans the canary, a small problem with a known result that takes some tens of microseconds.
// Returns MakePlan()'s error if the backend does not support it in any type.
absl::StatusOr<Plan> PlanCanary(const PlanOptions& options);

// Runs the canary once a second, as an event of the network threads, each in turn, and then on the
// compute threads, in memory allocated at startup: it waits neither for the budget nor in a queue,
// so overload does not affect readiness. Not ready
//   - while the canary has waited for a network thread for the stall timeout,
//   - while it waits for the compute threads and no task has completed for the stall timeout,
//   - while the last canary had a wrong result,
//   - before Start() and after Withdraw().
//
// Thread-safe. Everything that it references outlives it. Destruction waits for a pending canary.
class Readiness {
 public:
  // The check interval is a quarter of the stall timeout, but at most this.
  static constexpr std::chrono::seconds kLongestInterval{1};

  // Runs a function on a network thread. Not called after Withdraw().
  using PostToWire = std::function<void(absl::AnyInvocable<void()> run)>;

  // `canary` is the result of PlanCanary() for the executor's number of threads.
  Readiness(Plan canary, std::chrono::nanoseconds stall_timeout, PostToWire post_to_wire,
            Executor& executor, Timer& timer, const Clock& clock);
  ~Readiness();
  Readiness(const Readiness&) = delete;
  Readiness& operator=(const Readiness&) = delete;

  // Waits for the first canary, then checks periodically. `on_change` receives every change before
  // Withdraw(), one after the other, beginning with true. Internal if the canary's result is wrong.
  // REQUIRES: called once.
  absl::Status Start(std::function<void(bool ready)> on_change);

  bool is_ready() const { return computes_ && !withdrawn_; }
  void ExportTo(MetricSink& sink) const;

  // Makes the server not ready permanently, before shutdown.
  void Withdraw();

 private:
  enum class Canary : uint8_t { kOnWire, kOnThreads, kCorrect, kWrong };
  static bool IsPending(Canary canary) { return canary < Canary::kCorrect; }

  void SubmitCanary();
  void ComputeCanary();
  void OnCanaryDone();
  bool IsOutputCorrect() const;
  Canary CanaryState() const;
  Canary WaitForCanary() const;
  void Check();
  void Report(bool computes, absl::string_view reason);

  const Plan plan_;
  const std::chrono::nanoseconds stall_timeout_;
  const std::chrono::nanoseconds interval_;
  const PostToWire post_to_wire_;
  Executor& executor_;
  const Clock& clock_;
  std::function<void(bool)> on_change_;
  std::atomic<bool> computes_{false};
  std::atomic<bool> withdrawn_{false};

  AlignedBuffer inputs_, output_, workspace_;
  Arguments arguments_;

  mutable Mutex mutex_;
  mutable CondVar canary_done_;
  Canary canary_ ABSL_GUARDED_BY(mutex_) = Canary::kCorrect;

  // Used by Check() only, on the timer's thread.
  Canary last_state_ = Canary::kCorrect;
  int64_t ended_tasks_ = 0;
  std::chrono::nanoseconds without_progress_{0};
  Instant last_check_;

  Alarm alarm_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_READINESS_H_
