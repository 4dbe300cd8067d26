// Maps absl::Status to grpc::Status.
#ifndef RAPT_SERVER_WIRE_GRPC_STATUS_H_
#define RAPT_SERVER_WIRE_GRPC_STATUS_H_

#include <grpcpp/support/status.h>

#include "absl/status/status.h"

namespace rapt {

// Codes are equal. Truncates a message that is too long for a header.
grpc::Status ToGrpcStatus(const absl::Status& status);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_STATUS_H_
