#ifndef RAPT_SERVER_WIRE_UNARY_ANSWER_H_
#define RAPT_SERVER_WIRE_UNARY_ANSWER_H_

#include <grpcpp/server_context.h>
#include <grpcpp/support/server_callback.h>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "server/base/clock.h"
#include "server/wire/call_observer.h"

namespace rapt {

// A call that is answered on the spot: `fill` writes the response and says how it went.
grpc::ServerUnaryReactor* AnswerAtOnce(grpc::CallbackServerContext& context, const Clock& clock,
                                       const CallObserver& observe,
                                       absl::FunctionRef<absl::Status()> fill);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_UNARY_ANSWER_H_
