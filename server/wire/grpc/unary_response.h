#ifndef RAPT_SERVER_WIRE_GRPC_UNARY_RESPONSE_H_
#define RAPT_SERVER_WIRE_GRPC_UNARY_RESPONSE_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/status.h>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/calls/call.h"

namespace rapt {

// Responds to a call without tensors if its caller has access. `fill` writes the response and
// returns the status.
grpc::Status RespondAtOnce(grpc::ServerContext& context, const CallEnvironment& environment,
                           const CallObserver& observe, absl::FunctionRef<absl::Status()> fill);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_UNARY_RESPONSE_H_
