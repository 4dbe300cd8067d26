// What a call tells of itself when it is over. Protocols fill it, metrics and logs read it; neither
// knows the other.
#ifndef RAPT_SERVER_CALLS_CALL_REPORT_H_
#define RAPT_SERVER_CALLS_CALL_REPORT_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "attention/backend.h"
#include "attention/problem.h"
#include "server/request.h"

namespace rapt {

// Empty, or zero, where the call never came to it.
struct CallReport {
  static constexpr std::chrono::nanoseconds kNever{-1};

  absl::Status status;
  Stage ended_in = Stage::kQueue;     // the last stage that it came to
  std::chrono::nanoseconds total{0};  // from its arrival until its answer had left
  std::array<std::chrono::nanoseconds, kStages> stage_times = {kNever, kNever, kNever, kNever};
  int64_t received_bytes = 0;
  int64_t sent_bytes = 0;
  std::string traceparent;  // of W3C Trace Context, as its caller says

  // What was asked; lives as long as the observer's call.
  const Problem* problem = nullptr;
  Routing routing;
  std::string plan;      // Plan::Describe()
  double flops = 0;      // of the plan, once it is computed
  int64_t together = 0;  // Result::together

  std::chrono::nanoseconds& time_of(Stage stage) { return stage_times[static_cast<size_t>(stage)]; }
  std::chrono::nanoseconds time_of(Stage stage) const {
    return stage_times[static_cast<size_t>(stage)];
  }
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_CALL_REPORT_H_
