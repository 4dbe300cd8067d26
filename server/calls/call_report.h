// The report of a completed call. Protocols fill it and pass it to an observer, without knowing the
// metrics and logs, which read it independently of protocols.
#ifndef RAPT_SERVER_CALLS_CALL_REPORT_H_
#define RAPT_SERVER_CALLS_CALL_REPORT_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "attention/backend.h"
#include "attention/problem.h"
#include "server/request.h"

namespace rapt {

// A field is empty or zero if the call did not get that far.
struct CallReport {
  static constexpr std::chrono::nanoseconds kNever{-1};

  absl::Status status;
  Stage ended_in = Stage::kQueue;     // the last stage reached
  std::chrono::nanoseconds total{0};  // from arrival until the response was sent
  std::array<std::chrono::nanoseconds, kStages> stage_times = {kNever, kNever, kNever, kNever};
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  std::string traceparent;  // W3C Trace Context, as sent by the caller

  ModelId model;  // OtherModels() until it is known
  // The problem; valid during the call of the observer.
  const Problem* problem = nullptr;
  Routing routing;
  std::string plan;        // Plan::Describe()
  double flops = 0;        // of the completed plan
  int64_t batch_size = 0;  // Result::batch_size

  std::chrono::nanoseconds& time_of(Stage stage) { return stage_times[static_cast<size_t>(stage)]; }
  std::chrono::nanoseconds time_of(Stage stage) const {
    return stage_times[static_cast<size_t>(stage)];
  }
};

// Called once at the end of each call. Thread-safe.
using CallObserver = std::function<void(const CallReport& report)>;

// Returns the observer of a method, such as "inference.GRPCInferenceService/ModelInfer". Called at
// startup only, so that the observer resolves its labels once.
using CallObserverFactory = std::function<CallObserver(absl::string_view method)>;

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_CALL_REPORT_H_
