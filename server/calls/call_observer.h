// Callbacks through which protocols report calls without knowing the metrics.
#ifndef RAPT_SERVER_CALLS_CALL_OBSERVER_H_
#define RAPT_SERVER_CALLS_CALL_OBSERVER_H_

#include <functional>

#include "absl/strings/string_view.h"
#include "server/calls/call_report.h"

namespace rapt {

// Called once at the end of each call. Thread-safe.
using CallObserver = std::function<void(const CallReport& report)>;

// Returns the observer of a method, such as "inference.GRPCInferenceService/ModelInfer". Called at
// startup only, so that the observer resolves its labels once.
using CallObserverFactory = std::function<CallObserver(absl::string_view method)>;

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_CALL_OBSERVER_H_
