#include "server/wire/oip/stream_infer_call.h"

#include <algorithm>
#include <utility>

namespace rapt::oip {

StreamInferCall::StreamInferCall(const CallEnvironment& environment,
                                 const SharedMemory& shared_memory, const CallObserver& observe,
                                 MessageStream& stream)
    : StreamCall(stream),
      shared_memory_(shared_memory),
      call_(environment, observe),
      alarm_(environment.timer, [this] { OnAlarm(); }) {
  ++call_.streams().open;
}

void StreamInferCall::Begin() {
  const CallHeaders headers = stream().Headers(call_.arrived());
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
  const bool guesses = !stream().ReportsSizes() && expected_bytes_ > kStreamWindowBytes;
  const int64_t bytes = guesses ? expected_bytes_ : 0;
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
  stream().StartRead(kStreamWindowBytes);
}

// A larger message waits for its memory before it is received.
void StreamInferCall::OnSize(int64_t bytes) {
  alarm_.Cancel();
  if (absl::Status status = call_.CheckMessageSize(bytes); !status.ok()) {
    return Refuse(std::move(status));
  }
  call_.AdmitMessage(bytes, [this, bytes](absl::StatusOr<MessageReservation> memory) {
    if (!memory.ok()) return Refuse(memory.status());
    call_.KeepMessageMemory(*std::move(memory));
    has_size_ = true;
    call_.BeginReceiving(bytes, {.receive = true}, alarm_);
    alarm_.Set(call_.receive_end());
    stream().StartRead(bytes);
  });
}

void StreamInferCall::OnAlarm() {
  if (!is_reading_ || has_size_ || call_.Now() >= call_.deadline()) return stream().Cancel();
  call_.ReleaseMessageMemory();
  alarm_.Set(call_.deadline());
}

void StreamInferCall::Refuse(absl::Status status) {
  call_.Report(status);
  FinishStream(status);
}

void StreamInferCall::FinishStream(const absl::Status& status) {
  stream().StartFinish(status, call_);
}

void StreamInferCall::OnReadDone(bool ok) {
  alarm_.Cancel();
  is_reading_ = false;
  if (std::exchange(has_size_, false)) call_.EndReceiving();
  if (!ok) {
    call_.ReleaseMessageMemory();
    return FinishStream(
        absl::OkStatus());  // half-closed; a caller that disconnected does not read this
  }
  call_.MarkActive();
  decoded_ = {};
  absl::Status status = TakeMessage();
  if (status.ok()) status = Decode();
  if (!status.ok()) return RespondWithError(std::move(status));
  call_.engine().Submit(std::move(decoded_.request),
                        [this](Result result) { OnResult(std::move(result)); });
}

absl::Status StreamInferCall::TakeMessage() {
  absl::StatusOr<IncomingMessage> message = stream().TakeMessage();
  if (!message.ok()) return message.status();
  message_ = *std::move(message);
  if (!call_.declared_bytes()) expected_bytes_ = message_.bytes.size;
  return call_.AcceptMessage(message_.bytes.size);
}

absl::Status StreamInferCall::Decode() {
  absl::StatusOr<DecodedInfer> decoded =
      DecodeInfer(message_.bytes, call_.arrived(), shared_memory_);
  if (!decoded.ok()) return decoded.status();
  decoded_ = *std::move(decoded);
  Request& request = decoded_.request;
  request.deadline = std::min(request.deadline, call_.arrived() + call_.limits().default_deadline);
  call_.Bind(request);
  return absl::OkStatus();
}

void StreamInferCall::OnResult(Result result) {
  call_.Record(result);
  if (!result.status.ok()) return RespondWithError(std::move(result.status));
  status_ = absl::OkStatus();
  call_.report().ended_in = Stage::kSend;
  Respond(EncodeStreamInfer(decoded_, result));
}

void StreamInferCall::RespondWithError(absl::Status status) {
  status_ = std::move(status);
  Respond(EncodeStreamError(decoded_.id, status_));
}

void StreamInferCall::Respond(ResponseMessage response) {
  message_ = {};
  call_.ReleaseMessageMemory();
  // A caller that does not read would hold the outputs.
  const Instant deadline =
      std::min(call_.deadline(), call_.Now() + call_.limits().default_deadline);
  call_.BeginSending(response.size(), deadline, {.compute = true}, alarm_);
  alarm_.Set(call_.send_end());
  stream().StartWrite(std::move(response));
}

void StreamInferCall::OnWriteDone(bool ok) {
  alarm_.Cancel();
  if (!ok && status_.ok()) status_ = call_.NotSent();
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
}

}  // namespace rapt::oip
