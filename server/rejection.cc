#include "server/rejection.h"

#include "absl/strings/str_cat.h"
#include "base/status_value.h"

namespace rapt {
namespace {

constexpr char kPayload[] = "rapt/rejection";

}  // namespace

absl::string_view NameOf(Rejection rejection) {
  switch (rejection) {
    case Rejection::kNone:
      return "none";
    case Rejection::kTooLarge:
      return "too_large";
    case Rejection::kQueueFull:
      return "queue_full";
    case Rejection::kQueueTime:
      return "queue_time";
    case Rejection::kOpenCalls:
      return "open_calls";
    case Rejection::kCallerCalls:
      return "caller_calls";
    case Rejection::kCallerShare:
      return "caller_share";
    case Rejection::kSlowSender:
      return "slow_sender";
    case Rejection::kSlowReader:
      return "slow_reader";
    case Rejection::kDraining:
      return "draining";
    case Rejection::kOutOfMemory:
      return "out_of_memory";
  }
  return "?";
}

absl::Status Reject(Rejection why, absl::StatusCode code, absl::string_view message) {
  return StatusWith(kPayload, why, code, message);
}

absl::Status OutOfMemory(absl::string_view what) {
  return Reject(Rejection::kOutOfMemory, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the system has no memory for ", what));
}

Rejection RejectionOf(const absl::Status& status) { return ValueIn<Rejection>(status, kPayload); }

}  // namespace rapt
