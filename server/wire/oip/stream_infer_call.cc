#include "server/wire/oip/stream_infer_call.h"

#include <algorithm>
#include <utility>

#include "server/wire/deadline.h"
#include "server/wire/status.h"
#include "server/wire/traceparent.h"

namespace rapt::oip {

StreamInferCall::StreamInferCall(const CallEnvironment& environment,
                                 const SharedMemory& shared_memory, const CallObserver& observe,
                                 std::unique_ptr<GrpcCall> call)
    : GenericCall(std::move(call)),
      environment_(environment),
      shared_memory_(shared_memory),
      observe_(observe),
      began_(environment.clock.Now()),
      alarm_(environment.timer, [this] { context().TryCancel(); }) {
  ++environment_.streams.open;
}

void StreamInferCall::Begin() {
  traceparent_ = ReturnTraceparent(context());
  absl::StatusOr<std::string> caller = environment_.access.Identify(context());
  if (!caller.ok()) return Refuse(caller.status());
  caller_ = *std::move(caller);
  deadline_ =
      std::min(rapt::DeadlineOf(context(), began_), began_ + environment_.limits.max_deadline);
  alarm_.Set(deadline_);
  Wait();
}

void StreamInferCall::Wait() {
  const int64_t bytes = std::min<int64_t>(kWaitingBytes, environment_.limits.max_message_bytes);
  engine().AdmitMessage(
      bytes, deadline_, cancelled_,
      [this](absl::StatusOr<MessageReservation> place) { Read(std::move(place)); });
}

void StreamInferCall::Read(absl::StatusOr<MessageReservation> place) {
  if (!place.ok()) return Refuse(place.status());
  reservation_ = *std::move(place);
  StartRead(&buffer_);
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
  if (!ok) {
    reservation_ = {};
    return Finish(grpc::Status::OK);  // half-closed; where the caller left, nobody reads this
  }
  arrived_ = stage_began_ = Now();
  report_ = {};
  decoded_ = {};
  absl::Status status = message_.Take(buffer_);
  report_.received_bytes = message_.size();
  if (status.ok()) status = environment_.open_calls.Enter(caller_);
  if (!status.ok()) return AnswerError(std::move(status));
  is_open_ = true;
  Admit();
}

void StreamInferCall::Admit() {
  if (message_.size() <= reservation_.bytes()) {
    engine().ShrinkMessage(reservation_, message_.size());
    return Infer(std::move(reservation_));
  }
  reservation_ = {};  // who waits holds nothing
  engine().AdmitMessage(
      message_.size(), deadline_, cancelled_,
      [this](absl::StatusOr<MessageReservation> place) { Infer(std::move(place)); });
}

void StreamInferCall::Infer(absl::StatusOr<MessageReservation> place) {
  if (!place.ok()) return AnswerError(place.status());
  reservation_ = *std::move(place);
  if (absl::Status status = Decode(); !status.ok()) return AnswerError(std::move(status));
  engine().Submit(std::move(decoded_.request),
                  [this](Result result) { OnResult(std::move(result)); });
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
  report_.backend = result.backend;
  report_.declined = result.declined;
  report_.declined_for_now = result.declined_for_now;
  report_.plan = result.plan;
  if (!result.status.ok()) return AnswerError(std::move(result.status));
  report_.flops = result.flops;
  Answer(EncodeStreamInfer(decoded_, result));
}

void StreamInferCall::AnswerError(absl::Status status) {
  report_.status = std::move(status);
  Answer(EncodeStreamError(decoded_.id, report_.status));
}

void StreamInferCall::Answer(AnswerMessage answer) {
  message_.Clear();
  reservation_ = {};
  buffer_ = ToByteBuffer(std::move(answer));
  report_.sent_bytes = static_cast<int64_t>(buffer_.Length());
  if (report_.status.ok()) report_.ended_in = Stage::kSend;
  stage_began_ = Now();
  StartWrite(&buffer_);
}

void StreamInferCall::OnWriteDone(bool ok) {
  if (!ok && report_.status.ok()) report_.status = absl::CancelledError("the caller left");
  buffer_.Clear();
  Report();
  if (!ok) return Finish(grpc::Status::OK);  // that nobody reads
  Wait();
}

void StreamInferCall::Report() {
  const Instant now = Now();
  report_.time_of(Stage::kSend) = now - stage_began_;
  report_.total = now - arrived_;
  report_.traceparent = traceparent_;
  observe_(report_);
  if (std::exchange(is_open_, false)) environment_.open_calls.Leave(caller_);
}

void StreamInferCall::OnCancel() {
  cancelled_ = true;
  engine().NoticeCancellation();
}

void StreamInferCall::OnDone() {
  alarm_.Cancel();
  --environment_.streams.open;
  delete this;
}

}  // namespace rapt::oip
