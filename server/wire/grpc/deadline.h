#ifndef RAPT_SERVER_WIRE_GRPC_DEADLINE_H_
#define RAPT_SERVER_WIRE_GRPC_DEADLINE_H_

#include <grpcpp/server_context.h>

#include "base/clock.h"

namespace rapt {

// The call's gRPC deadline in our time, where it is `now`; Instant::max() where none came.
Instant DeadlineOf(const grpc::ServerContextBase& context, Instant now);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_DEADLINE_H_
