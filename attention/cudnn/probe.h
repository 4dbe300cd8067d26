// Runs an operation that may crash in a child process.
#ifndef RAPT_ATTENTION_CUDNN_PROBE_H_
#define RAPT_ATTENTION_CUDNN_PROBE_H_

#include <chrono>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"

namespace rapt::cudnn {

// Calls `attempt` in a forked child and returns its status; FailedPrecondition if a signal kills
// the child or it takes longer than `limit`; Cancelled, with the child killed, if SIGTERM or SIGINT
// arrives first, which stays pending. REQUIRES: the caller has blocked these signals and the
// process has no other thread yet.
absl::Status TryInChild(absl::FunctionRef<absl::Status()> attempt, std::chrono::seconds limit);

}  // namespace rapt::cudnn

#endif  // RAPT_ATTENTION_CUDNN_PROBE_H_
