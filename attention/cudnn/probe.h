// What may end the process is tried in a child first.
#ifndef RAPT_ATTENTION_CUDNN_PROBE_H_
#define RAPT_ATTENTION_CUDNN_PROBE_H_

#include <chrono>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace rapt::cudnn {

// Calls `attempt` in a forked child and tells what it says; FailedPrecondition with the signal
// where the child ends by one, or with the time where it takes longer than `limit`. Cancelled, and
// the child gone, where SIGTERM or SIGINT comes before, which the caller has blocked and which
// stays pending. The process has no other thread yet.
absl::Status TryInChild(absl::FunctionRef<absl::Status()> attempt, std::chrono::seconds limit);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_PROBE_H_
