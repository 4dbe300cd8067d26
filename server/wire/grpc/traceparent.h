// W3C Trace Context: which trace of its caller's a call belongs to.
#ifndef RAPT_SERVER_WIRE_GRPC_TRACEPARENT_H_
#define RAPT_SERVER_WIRE_GRPC_TRACEPARENT_H_

#include <grpcpp/server_context.h>

#include <string>

#include "absl/strings/string_view.h"

namespace rapt {

// Whether the specification lets a receiver use it: version 00 in full, and what it knows of those
// to come; never version ff, nor a trace or parent of zeros.
bool IsTraceparent(absl::string_view text);

// The call's traceparent, which is from now on in its trailing metadata as well. Empty, and nothing
// is returned, where none came, several did, or it is not one: as the specification says, such are
// ignored.
std::string ReturnTraceparent(grpc::ServerContextBase& context);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_TRACEPARENT_H_
