#include "client/cpp/reason.h"

#include <string>

#include "absl/strings/cord.h"
#include "absl/types/optional.h"
#include "rapt/cache.h"

namespace rapt::client {
namespace {

constexpr char kName[] = "rapt-reason";  // of the payload and the trailer

}  // namespace

void SetReason(absl::string_view reason, absl::Status& status) {
  if (!reason.empty()) status.SetPayload(kName, absl::Cord(reason));
}

void SetReason(const grpc::ClientContext& call, absl::Status& status) {
  const auto& trailers = call.GetServerTrailingMetadata();
  const auto reason = trailers.find(kName);
  if (reason != trailers.end()) SetReason({reason->second.data(), reason->second.size()}, status);
}

std::string ReasonOf(const absl::Status& status) {
  const absl::optional<absl::Cord> reason = status.GetPayload(kName);
  return reason ? std::string(*reason) : std::string();
}

}  // namespace rapt::client
