// How a protocol tells of its calls without knowing who counts them.
#ifndef RAPT_SERVER_CALLS_CALL_OBSERVER_H_
#define RAPT_SERVER_CALLS_CALL_OBSERVER_H_

#include <functional>

#include "absl/strings/string_view.h"
#include "server/calls/call_report.h"

namespace rapt {

// Called once at each call's end; thread-safe.
using CallObserver = std::function<void(const CallReport& report)>;

// Gives the observer of a method, "inference.GRPCInferenceService/ModelInfer". Called at start-up
// only, so that the observer resolves its labels once.
using CallObserverFactory = std::function<CallObserver(absl::string_view method)>;

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_CALL_OBSERVER_H_
