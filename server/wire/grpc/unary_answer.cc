#include "server/wire/grpc/unary_answer.h"

#include "server/wire/grpc/status.h"
#include "server/wire/grpc/traceparent.h"

namespace rapt {

grpc::Status AnswerAtOnce(grpc::ServerContext& context, const CallEnvironment& environment,
                          const CallObserver& observe, absl::FunctionRef<absl::Status()> fill) {
  const Instant arrived = environment.clock.Now();
  CallReport report;
  report.traceparent = ReturnTraceparent(context);
  report.status = environment.access.Identify(context).status();
  if (report.status.ok()) report.status = fill();
  report.total = environment.clock.Now() - arrived;
  observe(report);
  return ToGrpcStatus(report.status);
}

}  // namespace rapt
