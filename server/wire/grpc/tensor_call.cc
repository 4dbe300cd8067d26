#include "server/wire/grpc/tensor_call.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "server/rejection.h"
#include "server/wire/grpc/status.h"
#include "server/wire/grpc/traceparent.h"

namespace rapt {

TensorCall::TensorCall(const CallEnvironment& environment, const CallObserver& observe,
                       std::unique_ptr<GrpcCall> call)
    : GenericCall(std::move(call)),
      environment_(environment),
      observe_(observe),
      arrived_(environment.clock.Now()),
      stage_began_(arrived_),
      alarm_(environment.timer, [this] { OnAlarm(); }) {}

void TensorCall::Begin() {
  report_.traceparent = ReturnTraceparent(context());
  absl::StatusOr<std::string> caller = EnterOpenCalls(environment_, context());
  absl::Status status = caller.status();
  if (status.ok()) {
    caller_ = *std::move(caller);
    status = ReadHeaders();
  }
  if (!status.ok()) return End(std::move(status));
  engine().AdmitMessage(declared_bytes_.value_or(environment_.limits.max_message_bytes), deadline_,
                        cancelled_, [this](absl::StatusOr<MessageReservation> reservation) {
                          OnAdmitted(std::move(reservation));
                        });
}

absl::Status TensorCall::ReadHeaders() {
  const CallLimits& limits = environment_.limits;
  const absl::StatusOr<Instant> deadline = DeadlineOf(context(), arrived_, limits);
  if (!deadline.ok()) return deadline.status();
  deadline_ = *deadline;

  const absl::StatusOr<std::optional<int64_t>> declared = DeclaredBytes(context(), limits);
  if (!declared.ok()) return declared.status();
  declared_bytes_ = *declared;
  return absl::OkStatus();
}

void TensorCall::OnAdmitted(absl::StatusOr<MessageReservation> reservation) {
  stage_began_ = environment_.clock.Now();
  AddTime(Stage::kQueue, stage_began_ - arrived_, report_);
  if (!reservation.ok()) return End(reservation.status());
  report_.ended_in = Stage::kReceive;
  reservation_ = *std::move(reservation);
  receive_end_ =
      std::min(deadline_, ReceiveEnd(stage_began_, reservation_.bytes(), environment_.limits));
  alarm_.Set(receive_end_);
  Hold();  // the read may be done, and the call over, before StartRead() returns
  StartRead(&buffer_);
  Phase phase = Phase::kAdmitting;
  if (phase_.compare_exchange_strong(phase, Phase::kReading) &&
      environment_.clock.Now() >= receive_end_) {
    Evict();  // the alarm may have rung too early to do it
  }
  LetGo();
}

void TensorCall::OnAlarm() {
  if (phase_.load() == Phase::kAnswering) return context().TryCancel();
  Evict();
}

void TensorCall::Evict() {
  Phase phase = Phase::kReading;
  if (!phase_.compare_exchange_strong(phase, Phase::kEvicted)) return;
  if (receive_end_ == deadline_) {
    return End(absl::DeadlineExceededError("the deadline passed while the message was received"));
  }
  End(Reject(Rejection::kSlowSender, absl::StatusCode::kResourceExhausted,
             absl::StrCat("the message came slower than ",
                          environment_.limits.min_receive_bytes_per_second, " bytes a second")));
}

void TensorCall::OnReadDone(bool ok) {
  if (phase_.exchange(Phase::kReceived) == Phase::kEvicted) return;
  alarm_.Cancel();
  if (!ok) {
    message_lost_ = true;
    return End(absl::InvalidArgumentError("the call ended before its message was there"));
  }
  AddTime(Stage::kReceive, environment_.clock.Now() - stage_began_, report_);
  report_.ended_in = Stage::kCompute;  // TellOf() may know better
  if (absl::Status status = TakeMessage(); !status.ok()) return End(std::move(status));
  OnMessage(message_.bytes());
}

absl::Status TensorCall::TakeMessage() {
  absl::Status status = message_.Take(buffer_);
  if (!status.ok()) return status;
  report_.received_bytes = message_.size();
  engine().ShrinkMessage(reservation_, message_.size());
  return CheckSize(message_.size(), declared_bytes_, environment_.limits);
}

void TensorCall::Bind(Request& request) {
  request.deadline = std::min(request.deadline, deadline_);
  request.cancelled = &cancelled_;
  problem_ = request.call.problem;
  report_.problem = &problem_;
}

void TensorCall::TellOf(const Result& result) {
  report_.ended_in = result.ended_in;
  AddTime(Stage::kQueue, result.queue_time, report_);
  if (result.ended_in == Stage::kCompute) AddTime(Stage::kCompute, result.compute_time, report_);
  if (result.routing.backend == nullptr) return;
  report_.routing = result.routing;
  report_.plan = result.plan;
  report_.together = result.together;
  if (result.status.ok()) report_.flops = result.flops;

  AddTrailers(report_, environment_.clock.Now() - arrived_, context());
}

void TensorCall::Answer(AnswerMessage answer) {
  message_.Clear();
  reservation_ = {};
  ToByteBuffer(std::move(answer)).Swap(&buffer_);
  report_.sent_bytes = static_cast<int64_t>(buffer_.Length());
  report_.ended_in = Stage::kSend;
  stage_began_ = environment_.clock.Now();
  // A caller that does not read would keep the outputs.
  send_end_ = SendEnd(stage_began_, report_.sent_bytes, deadline_, environment_.limits);
  phase_ = Phase::kAnswering;
  alarm_.Set(send_end_);
  StartWriteAndFinish(&buffer_, grpc::Status::OK);
}

void TensorCall::End(absl::Status status) {
  report_.status = std::move(status);
  if (phase_.load() == Phase::kReceived) {
    message_.Clear();
    reservation_ = {};
  }
  Finish(ToGrpcStatus(report_.status));
}

void TensorCall::OnCancel() {
  cancelled_ = true;
  engine().NoticeCancellation();
}

void TensorCall::OnDone() {
  alarm_.Cancel();
  const Instant now = environment_.clock.Now();
  // A read may fail before it is known that the caller left.
  if (message_lost_ && cancelled_.load()) report_.status = absl::CancelledError("the caller left");
  // The answer was right, but it never left: the caller did, or read too slowly.
  if (phase_.load() == Phase::kAnswering && cancelled_.load()) {
    report_.status = NotSent(now, send_end_, deadline_, environment_.limits);
  }
  if (report_.ended_in == Stage::kReceive || report_.ended_in == Stage::kSend) {
    AddTime(report_.ended_in, now - stage_began_, report_);
  }
  report_.total = now - arrived_;
  observe_(report_);
  reservation_ = {};
  if (!caller_.empty()) environment_.open_calls.Leave(caller_);
  delete this;
}

}  // namespace rapt
