#include "server/wire/grpc/oip/stream_infer_call.h"

#include <algorithm>
#include <utility>

#include "server/wire/grpc/deadline.h"
#include "server/wire/grpc/receive_quota.h"
#include "server/wire/grpc/status.h"
#include "server/wire/grpc/traceparent.h"

namespace rapt::oip {

StreamInferCall::StreamInferCall(const CallEnvironment& environment,
                                 const SharedMemory& shared_memory, const CallObserver& observe,
                                 std::unique_ptr<GrpcCall> call)
    : GenericCall(std::move(call)),
      environment_(environment),
      shared_memory_(shared_memory),
      observe_(observe),
      began_(environment.clock.Now()),
      alarm_(environment.timer, [this] { OnAlarm(); }) {
  ++environment_.streams.open;
}

void StreamInferCall::Begin() {
  traceparent_ = ReturnTraceparent(context());
  absl::StatusOr<std::string> caller = EnterOpenCalls(environment_, context());
  if (!caller.ok()) return Refuse(caller.status());
  caller_ = *std::move(caller);
  environment_.open_calls.Rest();
  if (absl::Status status = ReadHeaders(); !status.ok()) return Refuse(status);
  Wait();
}

absl::Status StreamInferCall::ReadHeaders() {
  deadline_ =
      std::min(rapt::DeadlineOf(context(), began_), began_ + environment_.limits.max_deadline);
  const absl::StatusOr<std::optional<int64_t>> declared =
      DeclaredBytes(context(), environment_.limits);
  if (!declared.ok()) return declared.status();
  declared_bytes_ = *declared;
  expected_bytes_ = declared_bytes_.value_or(0);
  return absl::OkStatus();
}

// What fits into the stream's window comes without a read, and needs no place.
void StreamInferCall::Wait() {
  const int64_t bytes = expected_bytes_ > kStreamWindowBytes ? expected_bytes_ : 0;
  engine().AdmitMessage(
      bytes, deadline_, cancelled_,
      [this](absl::StatusOr<MessageReservation> place) { Read(std::move(place)); });
}

void StreamInferCall::Read(absl::StatusOr<MessageReservation> place) {
  if (place.ok()) {
    reservation_ = *std::move(place);
  } else if (!absl::IsResourceExhausted(place.status())) {
    return Refuse(place.status());
  }  // else nobody has asked for anything yet that could be refused
  is_reading_ = true;
  alarm_.Set(reservation_.bytes() > 0 ? std::min(deadline_, Now() + kPlaceTime) : deadline_);
  StartRead(&buffer_);
}

void StreamInferCall::OnAlarm() {
  if (!is_reading_ || Now() >= deadline_) return context().TryCancel();
  reservation_ = {};
  alarm_.Set(deadline_);
}

void StreamInferCall::Refuse(const absl::Status& status) {
  report_ = {};
  report_.status = status;
  report_.total = Now() - began_;
  report_.traceparent = traceparent_;
  observe_(report_);
  Finish(ToGrpcStatus(status));
}

void StreamInferCall::OnReadDone(bool ok) {
  alarm_.Cancel();
  is_reading_ = false;
  if (!ok) {
    reservation_ = {};
    return Finish(grpc::Status::OK);  // half-closed; where the caller left, nobody reads this
  }
  arrived_ = stage_began_ = Now();
  report_ = {};
  decoded_ = {};
  environment_.open_calls.Wake();
  absl::Status status = TakeMessage();
  if (status.ok()) status = Decode();
  if (!status.ok()) return AnswerError(std::move(status));
  engine().Submit(std::move(decoded_.request),
                  [this](Result result) { OnResult(std::move(result)); });
}

absl::Status StreamInferCall::TakeMessage() {
  absl::Status status = message_.Take(buffer_);
  if (!status.ok()) return status;
  report_.received_bytes = message_.size();
  if (!declared_bytes_) expected_bytes_ = message_.size();
  if (message_.size() > reservation_.bytes()) {
    reservation_ = engine().ChargeMessage(message_.size());
  } else {
    engine().ShrinkMessage(reservation_, message_.size());
  }
  return CheckSize(message_.size(), declared_bytes_, environment_.limits);
}

absl::Status StreamInferCall::Decode() {
  absl::StatusOr<DecodedInfer> decoded = DecodeInfer(message_.bytes(), arrived_, shared_memory_);
  if (!decoded.ok()) return decoded.status();
  decoded_ = *std::move(decoded);
  Request& request = decoded_.request;
  request.deadline =
      std::min({request.deadline, deadline_, arrived_ + environment_.limits.default_deadline});
  request.cancelled = &cancelled_;
  problem_ = request.call.problem;
  report_.problem = &problem_;
  return absl::OkStatus();
}

void StreamInferCall::OnResult(Result result) {
  report_.ended_in = result.ended_in;
  report_.time_of(Stage::kQueue) = result.queue_time;
  if (result.ended_in == Stage::kCompute) report_.time_of(Stage::kCompute) = result.compute_time;
  report_.routing = result.routing;
  report_.plan = result.plan;
  if (!result.status.ok()) return AnswerError(std::move(result.status));
  report_.flops = result.flops;
  report_.together = result.together;
  Answer(EncodeStreamInfer(decoded_, result));
}

void StreamInferCall::AnswerError(absl::Status status) {
  report_.status = std::move(status);
  Answer(EncodeStreamError(decoded_.id, report_.status));
}

void StreamInferCall::Answer(AnswerMessage answer) {
  message_.Clear();
  reservation_ = {};
  ToByteBuffer(std::move(answer)).Swap(&buffer_);
  report_.sent_bytes = static_cast<int64_t>(buffer_.Length());
  if (report_.status.ok()) report_.ended_in = Stage::kSend;
  stage_began_ = Now();
  // A caller that does not read would keep the outputs.
  answer_deadline_ = std::min(deadline_, stage_began_ + environment_.limits.default_deadline);
  send_end_ = SendEnd(stage_began_, report_.sent_bytes, answer_deadline_, environment_.limits);
  alarm_.Set(send_end_);
  StartWrite(&buffer_);
}

void StreamInferCall::OnWriteDone(bool ok) {
  alarm_.Cancel();
  if (!ok && report_.status.ok()) {
    report_.status = NotSent(Now(), send_end_, answer_deadline_, environment_.limits);
  }
  buffer_.Clear();
  Report();
  environment_.open_calls.Rest();
  if (!ok) return Finish(grpc::Status::OK);  // that nobody reads
  Wait();
}

void StreamInferCall::Report() {
  const Instant now = Now();
  report_.time_of(Stage::kSend) = now - stage_began_;
  report_.total = now - arrived_;
  report_.traceparent = traceparent_;
  observe_(report_);
}

void StreamInferCall::OnCancel() {
  cancelled_ = true;
  engine().NoticeCancellation();
}

void StreamInferCall::OnDone() {
  alarm_.Cancel();
  if (!caller_.empty()) environment_.open_calls.LeaveResting(caller_);
  --environment_.streams.open;
  delete this;
}

}  // namespace rapt::oip
