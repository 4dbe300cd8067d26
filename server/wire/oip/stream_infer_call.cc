#include "server/wire/oip/stream_infer_call.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/status_macros.h"

namespace rapt::oip {

StreamInferCall::StreamInferCall(const CallEnvironment& environment,
                                 const SharedMemory& shared_memory, cache::Sequences* sequences,
                                 const ModelContext& context, const CallObserver& observe,
                                 MethodTraits traits, MessageStream& stream)
    : StreamCall(stream),
      shared_memory_(shared_memory),
      sequences_(sequences),
      model_context_(context),
      call_(environment, observe, traits),
      alarm_(environment.timer, [this] { this->stream().Cancel(); }) {
  ++call_.streams().open;
  call_.KeepPace();
}

void StreamInferCall::Begin() {
  const CallHeaders headers = stream().Headers(call_.arrived());
  const absl::Status status = call_.Enter(headers);
  if (!status.ok()) return Refuse(status);
  call_.MarkIdle();
  call_.SetStreamDeadline(headers.deadline);
  Wait();
}

void StreamInferCall::Wait() {
  call_.AdmitMessage(0, [this](const absl::StatusOr<MessageReservation>& admitted) {
    if (!admitted.ok()) return Refuse(admitted.status());
    alarm_.Set(call_.deadline());
    stream().StartRead(/*max_bytes=*/0);
  });
}

// A small message has arrived, or is about to. A larger one waits for its memory before it is
// received.
void StreamInferCall::OnSize(int64_t bytes) {
  alarm_.Cancel();
  if (const absl::Status status = call_.CheckMessageSize(bytes); !status.ok()) {
    return Refuse(status);
  }
  if (bytes <= kMaxUnreservedBytes) {
    return Receive(bytes, call_.engine().ChargeMessage(bytes, call_.caller_memory()));
  }
  call_.AdmitMessage(bytes, [this, bytes](absl::StatusOr<MessageReservation> memory) {
    if (!memory.ok()) return Refuse(memory.status());
    Receive(bytes, *std::move(memory));
  });
}

void StreamInferCall::Receive(int64_t bytes, MessageReservation memory) {
  call_.KeepMessageMemory(std::move(memory));
  has_size_ = true;
  call_.BeginReceiving(bytes, {.receive = true}, alarm_);
  alarm_.Set(call_.receive_end());
  stream().StartRead(bytes);
}

void StreamInferCall::Refuse(const absl::Status& status) {
  call_.Report(status);
  FinishStream(status);
}

void StreamInferCall::FinishStream(const absl::Status& status) {
  stream().StartFinish(status, call_);
}

void StreamInferCall::OnReadDone(bool ok) {
  alarm_.Cancel();
  if (std::exchange(has_size_, false)) call_.EndReceiving();
  if (!ok) {
    call_.ReleaseMessageMemory();
    return FinishStream(
        absl::OkStatus());  // half-closed; a caller that disconnected does not read this
  }
  call_.MarkActive();
  run_.reset();
  id_.clear();
  message_ = stream().TakeMessage();
  call_.report().received_bytes += message_.bytes.size;
  absl::StatusOr<DecodedInfer> decoded = Decode();
  if (!decoded.ok()) return RespondWithError(decoded.status());
  run_.emplace().Start(sequences_, *std::move(decoded), call_,
                       [this](Result result) { OnResult(std::move(result)); });
}

absl::StatusOr<DecodedInfer> StreamInferCall::Decode() {
  RAPT_ASSIGN_OR_RETURN(DecodedInfer decoded,
                        DecodeInfer(message_.bytes, call_.arrived(), shared_memory_,
                                    &call_.report().model, model_context_, &id_));
  Request& request = decoded.request;
  request.deadline = std::min(request.deadline, call_.arrived() + call_.limits().default_deadline);
  return decoded;
}

void StreamInferCall::OnResult(Result result) {
  call_.Record(result);
  if (!result.status.ok()) return RespondWithError(std::move(result.status));
  status_ = absl::OkStatus();
  call_.report().ended_in = Stage::kSend;
  Respond(EncodeStreamInfer(run_->decoded(), result));
}

void StreamInferCall::RespondWithError(absl::Status status) {
  status_ = std::move(status);
  Respond(EncodeStreamError(id_, status_));
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
