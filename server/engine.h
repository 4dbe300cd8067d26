// The one way from a request to its result.
#ifndef RAPT_SERVER_ENGINE_H_
#define RAPT_SERVER_ENGINE_H_

#include <atomic>

#include "absl/status/statusor.h"
#include "server/admission/memory_budget.h"
#include "server/attention/plan.h"
#include "server/execution/executor.h"
#include "server/request.h"

namespace rapt {

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

  // From now on requests are refused; those submitted before run to their end.
  void StopAccepting() { accepting_ = false; }
  bool accepting() const { return accepting_; }

 private:
  struct Flight;
  absl::Status Prepare(Flight& flight);

  const PlanOptions options_;
  MemoryBudget& budget_;
  Executor& executor_;
  std::atomic<bool> accepting_{true};
};

}  // namespace rapt

#endif  // RAPT_SERVER_ENGINE_H_
