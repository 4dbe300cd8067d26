#include "server/calls/unary_call.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "base/status_macros.h"
#include "server/rejection.h"

namespace rapt {
namespace {

// A call waits this long for memory for more of its message, because it holds memory meanwhile.
constexpr std::chrono::seconds kMoreTime{1};

}  // namespace

UnaryCall::UnaryCall(const CallEnvironment& environment, const CallObserver& observe,
                     MethodTraits traits)
    : call_(environment, observe, traits), alarm_(environment.timer, [this] { OnAlarm(); }) {
  call_.KeepPace();
}

void UnaryCall::OnHeaders(const CallHeaders& headers) {
  if (absl::Status status = Open(headers); !status.ok()) return End(std::move(status));
  call_.report().ended_in = Stage::kReceive;
  call_.BeginReceiving(0, /*held=*/{}, alarm_);
  alarm_.Set(call_.receive_end());
  OnReadingStarted();
}

void UnaryCall::OnSize(int64_t bytes, int64_t extra_bytes) {
  Admit(bytes, extra_bytes, /*is_first=*/true);
}

void UnaryCall::OnMore(int64_t bytes, int64_t extra_bytes) {
  Admit(bytes, extra_bytes, /*is_first=*/false);
}

void UnaryCall::Admit(int64_t bytes, int64_t extra_bytes, bool is_first) {
  Phase phase = Phase::kReading;
  if (!phase_.compare_exchange_strong(phase, Phase::kAdmitting)) return;  // evicted
  call_.EndReceiving();
  message_bytes_ += bytes;
  if (absl::Status status = call_.CheckMessageSize(message_bytes_); !status.ok()) {
    return End(std::move(status));
  }
  const int64_t reserved = bytes + extra_bytes;
  admission_began_ = call_.Now();
  if (!call_.traits().carries_tensors) {
    return OnAdmitted(engine().ChargeMessage(reserved), bytes, is_first);
  }
  call_.report().ended_in = Stage::kQueue;
  auto admitted = [this, bytes, is_first](absl::StatusOr<MessageReservation> memory) {
    OnAdmitted(std::move(memory), bytes, is_first);
  };
  if (is_first) return call_.AdmitMessage(reserved, std::move(admitted));
  engine().AdmitNextMessage(reserved, std::min(call_.deadline(), admission_began_ + kMoreTime),
                            call_.cancelled(), call_.caller_memory(), std::move(admitted));
}

absl::Status UnaryCall::Open(const CallHeaders& headers) {
  RAPT_RETURN_IF_ERROR(call_.Enter(headers));
  return call_.SetDeadline(headers.deadline);
}

void UnaryCall::OnAdmitted(absl::StatusOr<MessageReservation> memory, int64_t bytes,
                           bool is_first) {
  call_.AddTimeSince(admission_began_, Stage::kQueue);
  if (!memory.ok()) return End(is_first ? memory.status() : NoMoreMemory(memory.status()));
  call_.report().ended_in = Stage::kReceive;
  call_.AddMessageMemory(*std::move(memory));
  call_.BeginReceiving(bytes, {.receive = true}, alarm_);
  alarm_.Set(call_.receive_end());
  StartReading();
}

// Returns the status of a call that gets no memory for more of its message.
absl::Status UnaryCall::NoMoreMemory(absl::Status status) const {
  if (!absl::IsDeadlineExceeded(status) || call_.Now() >= call_.deadline()) return status;
  return Reject(Rejection::kQueueTime, absl::StatusCode::kResourceExhausted,
                "no memory for more of the chunked body; send it with Content-Length");
}

bool UnaryCall::OnReadingStarted() {
  Phase phase = Phase::kAdmitting;
  if (!phase_.compare_exchange_strong(phase, Phase::kReading)) return true;
  if (call_.Now() < call_.receive_end()) return true;
  return !Evict();  // the alarm may have fired before this phase
}

void UnaryCall::OnAlarm() {
  if (phase_.load() == Phase::kResponding) return Abort();
  Evict();
}

// Returns whether it has ended the call, which may be destroyed by now.
bool UnaryCall::Evict() {
  Phase phase = Phase::kReading;
  if (!phase_.compare_exchange_strong(phase, Phase::kEvicted)) return false;
  if (call_.receive_end() < call_.deadline()) {
    End(call_.SlowSender("message"));
  } else {
    End(absl::DeadlineExceededError("the deadline passed while the message was received"));
  }
  return true;
}

// Returns false if the call was evicted meanwhile.
bool UnaryCall::EndReading() {
  if (phase_.exchange(Phase::kReceived) == Phase::kEvicted) return false;
  call_.EndWaits();  // the wait may set the alarm
  alarm_.Cancel();
  return true;
}

bool UnaryCall::OnRead(bool ok, std::optional<int64_t> bytes) {
  if (!EndReading()) return false;
  if (!ok) {
    message_lost_ = true;
    End(absl::InvalidArgumentError("the call ended before its message was complete"));
    return false;
  }
  call_.EndReceiving();
  call_.report().received_bytes += bytes.value_or(message_bytes_);
  call_.report().ended_in = Stage::kCompute;  // until Call::Record()
  return true;
}

void UnaryCall::OnBadRead(absl::Status status) {
  if (EndReading()) End(std::move(status));
}

void UnaryCall::BeginResponse(int64_t bytes) {
  ReleaseMessage();
  // Nothing was reserved for it.
  if (!call_.traits().carries_tensors) response_memory_ = engine().ChargeMessage(bytes);
  call_.report().ended_in = Stage::kSend;
  // A caller that does not read would hold the outputs.
  call_.BeginSending(bytes, call_.deadline(), {.compute = true}, alarm_);
  phase_ = Phase::kResponding;
  alarm_.Set(call_.send_end());
}

void UnaryCall::End(absl::Status status) {
  status_ = std::move(status);
  if (phase_.load() == Phase::kReceived) ReleaseMessage();
  Finish(status_);
}

void UnaryCall::ReleaseMessage() {
  DropMessage();
  call_.ReleaseMessageMemory();
}

void UnaryCall::OnClosed() {
  call_.EndWaits();
  alarm_.Cancel();
  const bool is_cancelled = call_.cancelled().load();
  // A read may fail before the cancellation by the caller is known.
  if (message_lost_ && is_cancelled)
    status_ = absl::CancelledError("the caller cancelled the call");
  // The response was complete but not sent: the caller disconnected or read too slowly.
  if (phase_.load() == Phase::kResponding && is_cancelled) status_ = call_.NotSent();
  if (call_.report().ended_in == Stage::kReceive) call_.EndReceiving();
  if (call_.report().ended_in == Stage::kSend) call_.EndSending();
  call_.Report(std::move(status_));
}

}  // namespace rapt
