#include "server/rejection.h"

#include <optional>
#include <string>

#include "absl/strings/cord.h"

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
  absl::Status status(code, message);
  status.SetPayload(kPayload, absl::Cord(std::string(1, static_cast<char>(why))));
  return status;
}

Rejection RejectionOf(const absl::Status& status) {
  if (status.ok()) return Rejection::kNone;
  const auto payload = status.GetPayload(kPayload);
  return payload ? static_cast<Rejection>(*payload->char_begin()) : Rejection::kNone;
}

}  // namespace rapt
