// A stream call that does one thing at a time.
#ifndef RAPT_SERVER_WIRE_RAPT_STEPWISE_CALL_H_
#define RAPT_SERVER_WIRE_RAPT_STEPWISE_CALL_H_

#include <cstdint>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/timer.h"
#include "server/calls/call.h"
#include "server/request.h"
#include "server/wire/message_stream.h"

namespace rapt::native {

// Receives a message, computes, or sends a message: the next step begins when the one before has
// ended. Therefore a stream holds the memory of one message, and HTTP/2 flow control applies
// backpressure to a faster sender. The first error ends the stream.
//
// The memory of each message is admitted. A caller that sends nothing for the default deadline is
// ended, and earlier if others wait for memory that the call holds. So is one that does not read.
//
// All steps run on the transport's thread; the alarm and the engine post theirs there.
class StepwiseCall : public StreamCall {
 public:
  void Begin() final;

 protected:
  // `observe` outlives the call. `held` says what a silent caller makes the call hold.
  StepwiseCall(const CallEnvironment& environment, const CallObserver& observe,
               MessageStream& stream, absl::string_view held, MethodTraits traits = {});

  // Each begins a step. One of the virtual functions is called when it has succeeded.
  void Receive();
  void Compute(Request request);
  // `held` is the memory that a caller who does not read makes the call hold.
  void Send(ResponseMessage message, AdmissionGate::Shares held);
  // Reserves memory of the receive share, waiting if necessary. REQUIRES: the call holds none of
  // it.
  void Reserve(int64_t bytes, absl::AnyInvocable<void(MessageReservation)> then);
  // Ends the call. REQUIRES: no step is under way.
  void End(absl::Status status, Stage stage);

  // Releases the message that was received last.
  void ReleaseMessage();
  Call& call() { return call_; }

 private:
  // An error ends the call before a message is received.
  virtual absl::Status Check() { return absl::OkStatus(); }
  // The message stays until ReleaseMessage() or the next Receive().
  virtual void OnMessage(const MessageBytes& message) = 0;
  // The caller has sent its last message.
  virtual void OnHalfClose() = 0;
  virtual void OnComputed(Result result) = 0;
  virtual void OnSent() = 0;
  // The memory that the call holds while it waits for a message.
  virtual AdmissionGate::Shares Held() const = 0;
  // Releases everything, except messages that the transport still sends.
  virtual void Release() = 0;

  void StartRead(int64_t max_bytes, bool holds_message);
  void EndRead();
  void ReceiveMessage(int64_t bytes, MessageReservation memory);
  void OnResult(Result result);
  void OnAlarm();
  bool IsLate() const;
  bool YieldsToWaiters() const { return call_.receive_end() == Instant::min(); }
  absl::Status TooSlow() const;
  void OnSize(int64_t bytes) override;
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override { call_.Cancel(); }
  void OnDone() override;

  Call call_;
  const absl::string_view held_;
  IncomingMessage message_;
  Instant silence_end_;  // a caller sends its next message before
  bool is_reading_ = false;
  bool has_size_ = false;  // the next message is being received, its memory admitted
  bool is_sending_ = false;
  bool has_left_ = false;  // the caller has half-closed or disconnected
  absl::Status status_;

  Alarm alarm_;  // the end of a transfer
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_STEPWISE_CALL_H_
