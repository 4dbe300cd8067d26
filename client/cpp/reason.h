// The reason of an error, a payload of its status that ReasonOf() of rapt/cache.h returns.
#ifndef RAPT_CLIENT_CPP_REASON_H_
#define RAPT_CLIENT_CPP_REASON_H_

#include <grpcpp/client_context.h>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace rapt::client {

// Does nothing if `status` is OK or there is no reason.
void SetReason(absl::string_view reason, absl::Status& status);
// The reason is the trailer of a call that has ended.
void SetReason(const grpc::ClientContext& call, absl::Status& status);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_REASON_H_
