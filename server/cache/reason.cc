#include "server/cache/reason.h"

#include "base/status_value.h"

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
  return StatusWith(kPayload, reason, code, message);
}

Reason ReasonOf(const absl::Status& status) { return ValueIn<Reason>(status, kPayload); }

absl::Status Refusals::Fail(Reason reason, absl::StatusCode code, absl::string_view message) {
  ++counts_[static_cast<size_t>(reason)];
  return cache::Fail(reason, code, message);
}

}  // namespace rapt::cache
