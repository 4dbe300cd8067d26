#include "client/cpp/reason.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/types/optional.h"
#include "rapt/cache.h"

namespace rapt::client {
namespace {

constexpr char kPayload[] = "rapt-reason";

}  // namespace

void SetReason(absl::string_view reason, absl::Status& status) {
  if (!reason.empty()) status.SetPayload(kPayload, absl::Cord(reason));
}

std::string ReasonOf(const absl::Status& status) {
  const absl::optional<absl::Cord> reason = status.GetPayload(kPayload);
  return reason ? std::string(*reason) : std::string();
}

}  // namespace rapt::client
