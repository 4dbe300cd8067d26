// The one mapping from our statuses to those that travel.
#ifndef RAPT_SERVER_WIRE_GRPC_STATUS_H_
#define RAPT_SERVER_WIRE_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace rapt {

// The codes are the same ones. A message too long for a header is cut.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_STATUS_H_
