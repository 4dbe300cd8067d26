// Whether this server computes. Every interface that tells of it asks here.
#ifndef RAPT_SERVER_READINESS_H_
#define RAPT_SERVER_READINESS_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "attention/plan.h"
#include "attention/problem.h"
#include "base/aligned_buffer.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/timer.h"
#include "server/execution/executor.h"

namespace rapt {

// How the canary, a small call with a known answer, is computed under these options: some tens of
// microseconds. MakePlan()'s errors, where the backend computes it in no type.
absl::StatusOr<Plan> PlanCanary(const PlanOptions& options);

// The canary goes through the compute threads once a second, in memory that it has had since the
// start: it waits neither for the budget nor in a queue, so that overload leaves the server ready.
// It is not ready
//   - while the canary waits and no task of anybody's has ended for the stall timeout,
//   - while the last canary came out wrong,
//   - before Start() and after Withdraw().
//
// Thread-safe. Everything borrowed outlives it. Destruction waits for a canary on its way.
class Readiness {
 public:
  // A quarter of the stall timeout, but no more than this, is between two looks.
  static constexpr std::chrono::seconds kLongestInterval{1};

  // `canary` is PlanCanary()'s, for the executor's number of threads.
  Readiness(Plan canary, std::chrono::nanoseconds stall_timeout, Executor& executor, Timer& timer,
            const Clock& clock);
  ~Readiness();
  Readiness(const Readiness&) = delete;
  Readiness& operator=(const Readiness&) = delete;

  // Waits for a first canary and watches from then on; call it once. `on_change` hears of every
  // change before Withdraw(), one after the other, beginning with true. Internal where the canary
  // comes out wrong.
  absl::Status Start(std::function<void(bool ready)> on_change);

  bool is_ready() const { return computes_ && !withdrawn_; }

  // For good: the server is about to leave.
  void Withdraw();

 private:
  enum class Canary : uint8_t { kOut, kRight, kWrong };

  void SendCanary();
  void OnCanaryBack();
  bool IsRight() const;
  Canary WhereIsCanary() const;
  Canary WaitForCanary() const;
  void Look();
  void Tell(bool computes, absl::string_view why_not);

  const Plan plan_;
  const std::chrono::nanoseconds stall_timeout_;
  const std::chrono::nanoseconds interval_;
  Executor& executor_;
  const Clock& clock_;
  std::function<void(bool)> on_change_;
  std::atomic<bool> computes_{false};
  std::atomic<bool> withdrawn_{false};

  AlignedBuffer inputs_, output_, workspace_;
  Arguments arguments_;

  mutable Mutex mutex_;
  mutable CondVar back_;
  Canary canary_ ABSL_GUARDED_BY(mutex_) = Canary::kRight;

  // Of Look(), which runs on the timer's thread alone.
  int64_t ended_tasks_ = 0;
  std::chrono::nanoseconds without_progress_{0};
  Instant last_look_;

  Alarm alarm_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_READINESS_H_
