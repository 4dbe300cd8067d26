#ifndef RAPT_SERVER_WIRE_GRPC_CALL_HEADERS_H_
#define RAPT_SERVER_WIRE_GRPC_CALL_HEADERS_H_

#include <grpcpp/server_context.h>

#include "base/clock.h"
#include "server/calls/call_headers.h"

namespace rapt {

// The headers of a call that arrived at `now`. They point into the context.
CallHeaders HeadersOf(const grpc::ServerContextBase& context, Instant now);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_CALL_HEADERS_H_
