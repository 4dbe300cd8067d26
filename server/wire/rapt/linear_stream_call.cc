#include "server/wire/rapt/linear_stream_call.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "server/rejection.h"

namespace rapt::native {
namespace {

// Such a message fits into the window that a stream has before it is read, and is charged when its
// size has arrived. A larger one waits until its memory is reserved.
constexpr int64_t kMaxUnreservedBytes = 64 * 1024;

}  // namespace

LinearStreamCall::LinearStreamCall(const CallEnvironment& environment, const CallObserver& observe,
                                   MessageStream& stream)
    : StreamCall(stream),
      call_(environment, observe),
      alarm_(environment.timer, [this] { this->stream().Post([this] { OnAlarm(); }); }) {
  ++call_.streams().open;
}

void LinearStreamCall::Begin() {
  const CallHeaders headers = stream().Headers(call_.arrived());
  if (absl::Status status = call_.Enter(headers); !status.ok()) {
    return End(std::move(status), Stage::kReceive);
  }
  call_.SetStreamDeadline(headers.deadline);
  call_.AdmitMessage(0, [this](const absl::StatusOr<MessageReservation>& admitted) {
    if (!admitted.ok()) return End(admitted.status(), Stage::kQueue);
    WaitForMessage();
  });
}

void LinearStreamCall::WaitForMessage() {
  silence_end_ = std::min(call_.deadline(), call_.Now() + call_.limits().default_deadline);
  StartRead(0, {.compute = sequence_.has_state()});
}

void LinearStreamCall::StartRead(int64_t max_bytes, AdmissionGate::Shares held) {
  is_reading_ = true;
  call_.BeginReceiving(max_bytes, held, alarm_);
  alarm_.SetNoLaterThan(has_size_ ? call_.receive_end() : silence_end_);
  stream().StartRead(max_bytes);
}

void LinearStreamCall::EndRead() {
  is_reading_ = false;
  call_.EndReceiving();
  alarm_.Cancel();
}

void LinearStreamCall::OnSize(int64_t bytes) {
  if (!is_reading_) return;  // ended by the alarm
  EndRead();
  if (absl::Status status = call_.CheckMessageSize(bytes); !status.ok()) {
    return End(std::move(status), Stage::kReceive);
  }
  if (bytes <= kMaxUnreservedBytes) {
    return Receive(bytes, call_.engine().ChargeMessage(bytes, call_.caller_memory()));
  }
  const Instant began = call_.Now();
  call_.AdmitNextMessage(bytes, [this, bytes, began](absl::StatusOr<MessageReservation> memory) {
    stream().Post([this, bytes, began, memory = std::move(memory)]() mutable {
      call_.AddTimeSince(began, Stage::kQueue);
      Receive(bytes, std::move(memory));
    });
  });
}

void LinearStreamCall::Receive(int64_t bytes, absl::StatusOr<MessageReservation> memory) {
  if (!memory.ok()) return End(memory.status(), Stage::kQueue);
  call_.KeepMessageMemory(*std::move(memory));
  has_size_ = true;
  StartRead(bytes, {.receive = true, .compute = sequence_.has_state()});
}

void LinearStreamCall::OnReadDone(bool ok) {
  if (!is_reading_) return;  // ended by the alarm
  EndRead();
  const bool is_whole = !std::exchange(has_size_, false);
  if (!ok) {
    has_left_ = true;
    if (is_whole) return End(absl::OkStatus(), Stage::kSend);
    return End(absl::InvalidArgumentError("the stream ended before its message was complete"),
               Stage::kReceive);
  }
  message_ = stream().TakeMessage();
  call_.report().received_bytes += message_.bytes.size;
  ++call_.streams().chunks;
  Compute();
}

void LinearStreamCall::Compute() {
  absl::StatusOr<Request> request = sequence_.Decode(message_.bytes);
  if (!request.ok()) return End(request.status(), Stage::kReceive);
  if (kept_memory_.bytes() != sequence_.kept_bytes()) {
    kept_memory_ = call_.engine().ChargeMessage(sequence_.kept_bytes(), call_.caller_memory());
  }
  call_.Bind(*request);
  call_.engine().Submit(*std::move(request), [this](Result result) {
    stream().Post([this, result = std::move(result)]() mutable { OnResult(std::move(result)); });
  });
}

void LinearStreamCall::OnResult(Result result) {
  call_.Record(result);
  if (!result.status.ok()) return End(std::move(result.status), result.ended_in);
  ResponseMessage response = sequence_.Encode(result);
  result = {};
  message_ = {};
  call_.ReleaseMessageMemory();
  is_sending_ = true;
  // A caller that does not read would hold the outputs.
  const Instant deadline =
      std::min(call_.deadline(), call_.Now() + call_.limits().default_deadline);
  call_.BeginSending(response.size(), deadline, {.compute = true}, alarm_);
  alarm_.SetNoLaterThan(call_.send_end());
  stream().StartWrite(std::move(response));
}

void LinearStreamCall::OnWriteDone(bool ok) {
  is_sending_ = false;
  absl::Status status = ok ? absl::OkStatus() : call_.NotSent();
  call_.EndSending();
  alarm_.Cancel();
  if (!ok) return End(std::move(status), Stage::kSend);
  WaitForMessage();
}

void LinearStreamCall::OnAlarm() {
  if (!IsLate()) return;  // for a transfer that has ended since
  if (is_sending_) return stream().Cancel();
  absl::Status status = TooSlow();
  EndRead();
  End(std::move(status), Stage::kReceive);
}

bool LinearStreamCall::IsLate() const {
  const Instant now = call_.Now();
  if (is_sending_) return now >= call_.send_end();
  if (!is_reading_) return false;
  return has_size_ ? now >= call_.receive_end() : now >= silence_end_ || GivesWay();
}

absl::Status LinearStreamCall::TooSlow() const {
  if (call_.Now() >= call_.deadline()) return call_.CancelledOrLate();
  if (has_size_ || GivesWay()) return call_.SlowSender("stream");
  return Reject(
      Rejection::kSlowSender, absl::StatusCode::kResourceExhausted,
      absl::StrCat("no message arrived for ",
                   absl::FormatDuration(absl::FromChrono(call_.limits().default_deadline)),
                   ", while the stream held its state"));
}

// Releases the memory before the caller receives the status, except results that the transport
// still sends.
void LinearStreamCall::End(absl::Status status, Stage stage) {
  status_ = std::move(status);
  call_.report().ended_in = stage;
  message_ = {};
  call_.ReleaseMessageMemory();
  sequence_ = {};
  kept_memory_ = {};
  alarm_.Cancel();  // it posts nothing afterwards
  stream().StartFinish(status_, call_);
}

void LinearStreamCall::OnDone() {
  call_.EndWaits();
  // A read may fail before the cancellation by the caller is known.
  if (has_left_ && call_.cancelled()) status_ = call_.CancelledOrLate();
  call_.Report(std::move(status_));
  --call_.streams().open;
}

}  // namespace rapt::native
