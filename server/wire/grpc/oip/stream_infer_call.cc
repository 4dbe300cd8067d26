#include "server/wire/grpc/oip/stream_infer_call.h"

#include <algorithm>
#include <utility>

#include "server/wire/grpc/call_headers.h"
#include "server/wire/grpc/receive_quota.h"
#include "server/wire/grpc/status.h"

namespace rapt::oip {

StreamInferCall::StreamInferCall(const CallEnvironment& environment,
                                 const SharedMemory& shared_memory, const CallObserver& observe,
                                 std::unique_ptr<GrpcCall> call)
    : GenericCall(std::move(call)),
      shared_memory_(shared_memory),
      call_(environment, observe),
      alarm_(environment.timer, [this] { OnAlarm(); }) {
  ++call_.streams().open;
}

void StreamInferCall::Begin() {
  const CallHeaders headers = HeadersOf(context(), call_.arrived());
  absl::Status status = call_.Enter(headers);
  if (status.ok()) status = ReadHeaders(headers);
  if (!status.ok()) return Refuse(std::move(status));
  Wait();
}

absl::Status StreamInferCall::ReadHeaders(const CallHeaders& headers) {
  call_.MarkIdle();
  call_.SetStreamDeadline(headers.deadline);
  absl::Status status = call_.ReadDeclaredBytes(headers);
  expected_bytes_ = call_.declared_bytes().value_or(0);
  return status;
}

// A message that fits into the stream's window arrives without a read and needs no reservation.
void StreamInferCall::Wait() {
  const int64_t bytes = expected_bytes_ > kStreamWindowBytes ? expected_bytes_ : 0;
  call_.AdmitMessage(
      bytes, [this](absl::StatusOr<MessageReservation> memory) { Read(std::move(memory)); });
}

void StreamInferCall::Read(absl::StatusOr<MessageReservation> memory) {
  if (memory.ok()) {
    call_.KeepMessageMemory(*std::move(memory));
  } else if (!absl::IsResourceExhausted(memory.status())) {
    return Refuse(memory.status());
  }  // on ResourceExhausted there is no request yet to reject
  is_reading_ = true;
  const bool has_memory = call_.message_memory_bytes() > 0;
  alarm_.Set(has_memory ? std::min(call_.deadline(), call_.Now() + kReservationTime)
                        : call_.deadline());
  StartRead(&buffer_);
}

void StreamInferCall::OnAlarm() {
  if (!is_reading_ || call_.Now() >= call_.deadline()) return context().TryCancel();
  call_.ReleaseMessageMemory();
  alarm_.Set(call_.deadline());
}

void StreamInferCall::Refuse(absl::Status status) {
  call_.Report(status);
  FinishStream(status);
}

void StreamInferCall::FinishStream(const absl::Status& status) {
  AddTrailers(call_);
  StartFinish(ToGrpcStatus(status));
}

void StreamInferCall::OnReadDone(bool ok) {
  alarm_.Cancel();
  is_reading_ = false;
  if (!ok) {
    call_.ReleaseMessageMemory();
    return FinishStream(
        absl::OkStatus());  // half-closed; a caller that disconnected does not read this
  }
  call_.MarkActive();
  decoded_ = {};
  absl::Status status = TakeMessage();
  if (status.ok()) status = Decode();
  if (!status.ok()) return AnswerError(std::move(status));
  call_.engine().Submit(std::move(decoded_.request),
                        [this](Result result) { OnResult(std::move(result)); });
}

absl::Status StreamInferCall::TakeMessage() {
  absl::Status status = message_.Take(buffer_);
  if (!status.ok()) return status;
  if (!call_.declared_bytes()) expected_bytes_ = message_.size();
  return call_.AcceptMessage(message_.size());
}

absl::Status StreamInferCall::Decode() {
  absl::StatusOr<DecodedInfer> decoded =
      DecodeInfer(message_.bytes(), call_.arrived(), shared_memory_);
  if (!decoded.ok()) return decoded.status();
  decoded_ = *std::move(decoded);
  Request& request = decoded_.request;
  request.deadline = std::min(request.deadline, call_.arrived() + call_.limits().default_deadline);
  call_.Bind(request);
  return absl::OkStatus();
}

void StreamInferCall::OnResult(Result result) {
  call_.Record(result);
  if (!result.status.ok()) return AnswerError(std::move(result.status));
  status_ = absl::OkStatus();
  call_.report().ended_in = Stage::kSend;
  Answer(EncodeStreamInfer(decoded_, result));
}

void StreamInferCall::AnswerError(absl::Status status) {
  status_ = std::move(status);
  Answer(EncodeStreamError(decoded_.id, status_));
}

void StreamInferCall::Answer(AnswerMessage answer) {
  message_.Clear();
  call_.ReleaseMessageMemory();
  ToByteBuffer(std::move(answer)).Swap(&buffer_);
  // A caller that does not read would hold the outputs.
  const Instant deadline =
      std::min(call_.deadline(), call_.Now() + call_.limits().default_deadline);
  call_.BeginSending(static_cast<int64_t>(buffer_.Length()), deadline, {.compute = true}, alarm_);
  alarm_.Set(call_.send_end());
  StartWrite(&buffer_);
}

void StreamInferCall::OnWriteDone(bool ok) {
  alarm_.Cancel();
  if (!ok && status_.ok()) status_ = call_.NotSent();
  buffer_.Clear();
  call_.EndSending();
  call_.Report(std::move(status_));
  call_.MarkIdle();
  if (!ok) return FinishStream(absl::OkStatus());  // the caller disconnected
  Wait();
}

void StreamInferCall::OnDone() {
  call_.EndWaits();
  alarm_.Cancel();
  --call_.streams().open;
  delete this;
}

}  // namespace rapt::oip
