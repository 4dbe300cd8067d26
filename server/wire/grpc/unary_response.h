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

// A service whose methods without tensors are those of `Methods`. Thread-safe. REQUIRES: everything
// borrowed outlives it.
template <typename Rpcs, typename Methods>
class UnaryService : public Rpcs {
 public:
  UnaryService(const CallEnvironment& environment, const Methods& methods)
      : environment_(environment), methods_(methods) {}

 protected:
  const Methods& methods() const { return methods_; }

  template <typename ProtoRequest, typename ProtoResponse>
  grpc::Status Respond(grpc::ServerContext* context, const CallObserver& observe,
                       const ProtoRequest* request, ProtoResponse* response) {
    return RespondAtOnce(*context, environment_, observe,
                         [&] { return methods_.Respond(*request, *response); });
  }

 private:
  const CallEnvironment& environment_;
  const Methods& methods_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_UNARY_RESPONSE_H_
