#include "server/cache/reason.h"

#include <optional>
#include <string>

#include "absl/strings/cord.h"

namespace rapt::cache {
namespace {

constexpr absl::string_view kPayload = "rapt/cache_reason";

}  // namespace

absl::string_view NameOf(Reason reason) {
  switch (reason) {
    case Reason::kNone:
      return "";
    case Reason::kUnknown:
      return "unknown";
    case Reason::kClosed:
      return "closed";
    case Reason::kExpired:
      return "expired";
    case Reason::kRestarted:
      return "restarted";
    case Reason::kWrongInstance:
      return "wrong_instance";
    case Reason::kPages:
      return "pages";
    case Reason::kQuota:
      return "quota";
    case Reason::kEvicted:
      return "evicted";
    case Reason::kConflict:
      return "conflict";
    case Reason::kGeneration:
      return "generation";
    case Reason::kDraining:
      return "draining";
  }
  return "";
}

absl::Status Fail(Reason reason, absl::StatusCode code, absl::string_view message) {
  absl::Status status(code, message);
  status.SetPayload(kPayload, absl::Cord(std::string(1, static_cast<char>(reason))));
  return status;
}

Reason ReasonOf(const absl::Status& status) {
  const absl::optional<absl::Cord> reason = status.GetPayload(kPayload);
  return reason ? static_cast<Reason>(std::string(*reason).front()) : Reason::kNone;
}

}  // namespace rapt::cache
