#include "server/wire/rapt/stepwise_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/rejection.h"

namespace rapt::native {

StepwiseCall::StepwiseCall(const CallEnvironment& environment, const CallObserver& observe,
                           MessageStream& stream, absl::string_view held, MethodTraits traits)
    : StreamCall(stream),
      call_(environment, observe, traits),
      held_(held),
      alarm_(environment.timer, [this] { this->stream().Post([this] { OnAlarm(); }); }) {
  ++call_.streams().open;
}

void StepwiseCall::Begin() {
  const CallHeaders headers = stream().Headers(call_.arrived());
  absl::Status status = call_.Enter(headers);
  if (status.ok()) status = Check();
  if (!status.ok()) return End(std::move(status), Stage::kReceive);
  call_.SetStreamDeadline(headers.deadline);
  call_.AdmitMessage(0, [this](const absl::StatusOr<MessageReservation>& admitted) {
    if (!admitted.ok()) return End(admitted.status(), Stage::kQueue);
    Receive();
  });
}

void StepwiseCall::Receive() {
  ReleaseMessage();
  silence_end_ = std::min(call_.deadline(), call_.Now() + call_.limits().default_deadline);
  StartRead(0, /*holds_message=*/false);
}

void StepwiseCall::StartRead(int64_t max_bytes, bool holds_message) {
  is_reading_ = true;
  AdmissionGate::Shares held = Held();
  held.receive |= holds_message;
  call_.BeginReceiving(max_bytes, held, alarm_);
  alarm_.SetNoLaterThan(has_size_ ? call_.receive_end() : silence_end_);
  stream().StartRead(max_bytes);
}

void StepwiseCall::EndRead() {
  is_reading_ = false;
  call_.EndReceiving();
  alarm_.Cancel();
}

void StepwiseCall::OnSize(int64_t bytes) {
  if (!is_reading_) return;  // ended by the alarm
  EndRead();
  if (absl::Status status = call_.CheckMessageSize(bytes); !status.ok()) {
    return End(std::move(status), Stage::kReceive);
  }
  // A small one fits into the window that a stream has before it is read, and is charged when its
  // size has arrived. A larger one waits until its memory is reserved.
  if (bytes <= kMaxSmallMessageBytes) {
    return ReceiveMessage(bytes, call_.engine().ChargeMessage(bytes, call_.caller_memory()));
  }
  Reserve(bytes,
          [this, bytes](MessageReservation memory) { ReceiveMessage(bytes, std::move(memory)); });
}

void StepwiseCall::Reserve(int64_t bytes, absl::AnyInvocable<void(MessageReservation)> then) {
  const Instant began = call_.Now();
  call_.AdmitNextMessage(bytes, [this, began, then = std::move(then)](
                                    absl::StatusOr<MessageReservation> memory) mutable {
    stream().Post([this, began, then = std::move(then), memory = std::move(memory)]() mutable {
      call_.AddTimeSince(began, Stage::kQueue);
      if (!memory.ok()) return End(memory.status(), Stage::kQueue);
      then(*std::move(memory));
    });
  });
}

void StepwiseCall::ReceiveMessage(int64_t bytes, MessageReservation memory) {
  call_.KeepMessageMemory(std::move(memory));
  has_size_ = true;
  StartRead(bytes, /*holds_message=*/true);
}

void StepwiseCall::OnReadDone(bool ok) {
  if (!is_reading_) return;  // ended by the alarm
  EndRead();
  const bool is_whole = !std::exchange(has_size_, false);
  if (!ok) {
    has_left_ = true;
    if (call_.cancelled()) return End(call_.CancelledOrLate(), Stage::kReceive);
    if (is_whole) return OnHalfClose();
    return End(absl::InvalidArgumentError("the stream ended before its message was complete"),
               Stage::kReceive);
  }
  message_ = stream().TakeMessage();
  call_.report().received_bytes += message_.bytes.size;
  ++call_.streams().chunks;
  OnMessage(message_.bytes);
}

void StepwiseCall::Compute(Request request) {
  call_.Bind(request);
  call_.engine().Submit(std::move(request), [this](Result result) {
    stream().Post([this, result = std::move(result)]() mutable { OnResult(std::move(result)); });
  });
}

void StepwiseCall::OnResult(Result result) {
  call_.Record(result);
  if (!result.status.ok()) return End(std::move(result.status), result.ended_in);
  OnComputed(std::move(result));
}

void StepwiseCall::Send(ResponseMessage message, AdmissionGate::Shares held) {
  is_sending_ = true;
  has_left_ = false;  // whether the message is sent tells
  // A caller that does not read would hold the message.
  const Instant deadline =
      std::min(call_.deadline(), call_.Now() + call_.limits().default_deadline);
  call_.BeginSending(message.size(), deadline, held, alarm_);
  alarm_.SetNoLaterThan(call_.send_end());
  stream().StartWrite(std::move(message));
}

void StepwiseCall::OnWriteDone(bool ok) {
  is_sending_ = false;
  absl::Status status = ok ? absl::OkStatus() : call_.NotSent();
  call_.EndSending();
  alarm_.Cancel();
  if (!ok) return End(std::move(status), Stage::kSend);
  OnSent();
}

void StepwiseCall::OnAlarm() {
  if (!IsLate()) return;  // for a transfer that has ended since
  if (is_sending_) return stream().Cancel();
  absl::Status status = TooSlow();
  EndRead();
  End(std::move(status), Stage::kReceive);
}

bool StepwiseCall::IsLate() const {
  const Instant now = call_.Now();
  if (is_sending_) return now >= call_.send_end();
  if (!is_reading_) return false;
  return has_size_ ? now >= call_.receive_end() : now >= silence_end_ || YieldsToWaiters();
}

absl::Status StepwiseCall::TooSlow() const {
  if (call_.Now() >= call_.deadline()) return call_.CancelledOrLate();
  if (has_size_ || YieldsToWaiters()) return call_.SlowSender("stream");
  return Reject(
      Rejection::kSlowSender, absl::StatusCode::kResourceExhausted,
      absl::StrCat("no message arrived for ",
                   absl::FormatDuration(absl::FromChrono(call_.limits().default_deadline)),
                   ", while the stream held ", held_));
}

void StepwiseCall::ReleaseMessage() {
  message_ = {};
  call_.ReleaseMessageMemory();
}

// Releases the memory before the caller receives the status.
void StepwiseCall::End(absl::Status status, Stage stage) {
  status_ = std::move(status);
  call_.report().ended_in = stage;
  ReleaseMessage();
  Release();
  alarm_.Cancel();  // it posts nothing afterwards
  stream().StartFinish(status_, call_);
}

void StepwiseCall::OnDone() {
  call_.EndWaits();
  // A read may fail before the cancellation by the caller is known.
  if (has_left_ && call_.cancelled()) status_ = call_.CancelledOrLate();
  call_.Report(std::move(status_));
  --call_.streams().open;
}

}  // namespace rapt::native
