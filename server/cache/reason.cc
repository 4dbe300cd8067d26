#include "server/cache/reason.h"

#include <optional>
#include <string>

#include "absl/strings/cord.h"

namespace rapt::cache {
namespace {

constexpr absl::string_view kPayload = "rapt/cache_reason";
constexpr Reason kReasons[] = {Reason::kUnknown,       Reason::kClosed,   Reason::kExpired,
                               Reason::kRestarted,     Reason::kPages,    Reason::kQuota,
                               Reason::kWrongInstance, Reason::kConflict, Reason::kGeneration};

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
    case Reason::kConflict:
      return "conflict";
    case Reason::kGeneration:
      return "generation";
  }
  return "";
}

absl::Status Fail(Reason reason, absl::StatusCode code, absl::string_view message) {
  absl::Status status(code, message);
  status.SetPayload(kPayload, absl::Cord(NameOf(reason)));
  return status;
}

Reason ReasonOf(const absl::Status& status) {
  const absl::optional<absl::Cord> name = status.GetPayload(kPayload);
  if (!name) return Reason::kNone;
  for (Reason reason : kReasons) {
    if (*name == NameOf(reason)) return reason;
  }
  return Reason::kNone;
}

}  // namespace rapt::cache
