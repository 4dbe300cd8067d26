// The one way from a request to its result, or to a diagnosis of it.
#ifndef RAPT_SERVER_ENGINE_H_
#define RAPT_SERVER_ENGINE_H_

#include <atomic>
#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "server/admission/memory_budget.h"
#include "server/attention/diagnosis.h"
#include "server/attention/plan.h"
#include "server/execution/executor.h"
#include "server/request.h"

namespace rapt {

// Runs exactly once for each diagnosis, on any thread.
using DiagnosisDone = absl::AnyInvocable<void(absl::StatusOr<DiagnosisReport>)>;

// Plan, admission, execution, done: only this class knows the order. Thread-safe. Budget and
// executor outlive it.
class Engine {
 public:
  // `options` are valid and for the executor's number of threads.
  Engine(PlanOptions options, MemoryBudget& budget, Executor& executor);

  // Calls done exactly once: on this thread where the request is refused or tiny, else on a compute
  // thread. Its status is
  //   Unavailable         after StopAccepting()
  //   InvalidArgument     what only the data tells, such as key lengths
  //   Unimplemented       the configured backend can't compute it
  //   ResourceExhausted   it does not fit into the memory budget
  //   DeadlineExceeded, Cancelled
  void Submit(Request request, Done done);

  // Looks into the request instead of answering it; statuses as with Submit(), but what the
  // configured backend can't compute is no error, the report says so.
  void Diagnose(Request request, DiagnosisDone done);

  // For an input that has to be converted before its request is submitted. ResourceExhausted where
  // the memory budget has no room for it.
  absl::StatusOr<InputBuffer> AllocateInput(int64_t bytes);

  // From now on requests are refused; those submitted before run to their end.
  void StopAccepting() { accepting_ = false; }
  bool accepting() const { return accepting_; }

  const PlanOptions& plan_options() const { return options_; }
  const MemoryBudget& memory_budget() const { return budget_; }

 private:
  struct Flight;
  struct Examination;
  absl::Status CheckAccepting() const;
  absl::Status Prepare(Flight& flight);
  // Reserves outputs and workspace of a flight that has a plan, then allocates them.
  absl::Status Allocate(Flight& flight);
  absl::Status Prepare(Examination& examination);

  const PlanOptions options_;
  MemoryBudget& budget_;
  Executor& executor_;
  std::atomic<bool> accepting_{true};
};

}  // namespace rapt

#endif  // RAPT_SERVER_ENGINE_H_
