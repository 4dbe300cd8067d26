#include "server/wire/grpc/unary_response.h"

#include "server/calls/traceparent.h"
#include "server/wire/grpc/call_headers.h"
#include "server/wire/grpc/status.h"

namespace rapt {

grpc::Status RespondAtOnce(grpc::ServerContext& context, const CallEnvironment& environment,
                           const CallObserver& observe, absl::FunctionRef<absl::Status()> fill) {
  const Instant arrived = environment.clock.Now();
  const CallHeaders headers = HeadersOf(context, arrived);
  CallReport report;
  report.traceparent = TraceparentOf(headers.traceparent);
  if (!report.traceparent.empty()) {
    context.AddTrailingMetadata(kTraceparentHeader, report.traceparent);
  }
  report.status = environment.access.Identify(headers).status();
  if (report.status.ok()) report.status = fill();
  report.total = environment.clock.Now() - arrived;
  observe(report);
  return ToGrpcStatus(report.status);
}

}  // namespace rapt
