#include "server/wire/unary_answer.h"

#include "server/wire/status.h"

namespace rapt {

grpc::ServerUnaryReactor* AnswerAtOnce(grpc::CallbackServerContext& context, const Clock& clock,
                                       const CallObserver& observe,
                                       absl::FunctionRef<absl::Status()> fill) {
  const Instant arrived = clock.Now();
  CallReport report;
  report.status = fill();
  report.total = clock.Now() - arrived;
  observe(report);
  grpc::ServerUnaryReactor* reactor = context.DefaultReactor();
  reactor->Finish(ToGrpcStatus(report.status));
  return reactor;
}

}  // namespace rapt
