#include "server/wire/engine_call.h"

#include <algorithm>
#include <utility>

#include "server/wire/deadline.h"
#include "server/wire/status.h"

namespace rapt {

EngineCall::EngineCall(const CallEnvironment& environment, const CallObserver& observe,
                       grpc::CallbackServerContext& context)
    : environment_(environment),
      observe_(observe),
      context_(context),
      arrived_(environment.clock.Now()) {
  environment_.open_calls.Enter();
}

void EngineCall::Bind(Request& request) {
  request.deadline = std::min(request.deadline, DeadlineOf(context_, arrived_));
  request.cancelled = &cancelled_;
}

void EngineCall::NamePlan(const Result& result) {
  if (result.backend.empty()) return;
  context_.AddTrailingMetadata("rapt-backend", result.backend);
  context_.AddTrailingMetadata("rapt-plan", result.plan);
}

void EngineCall::End(absl::Status status) {
  status_ = std::move(status);
  Finish(ToGrpcStatus(status_));
}

void EngineCall::OnDone() {
  observe_(status_.code(), environment_.clock.Now() - arrived_);
  environment_.open_calls.Leave();
  delete this;
}

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
