#include "server/wire/unary_answer.h"

#include "server/wire/status.h"

namespace rapt {

grpc::ServerUnaryReactor* AnswerAtOnce(grpc::CallbackServerContext& context, const Clock& clock,
                                       const CallObserver& observe,
                                       absl::FunctionRef<absl::Status()> fill) {
  const Instant arrived = clock.Now();
  const absl::Status status = fill();
  observe(status.code(), clock.Now() - arrived);
  grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
  reactor->Finish(ToGrpcStatus(status));
  return reactor;
}

}  // namespace rapt
