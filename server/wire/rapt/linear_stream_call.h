// LinearAttendStream: tokens in any number of messages, with the state kept between them.
#ifndef RAPT_SERVER_WIRE_RAPT_LINEAR_STREAM_CALL_H_
#define RAPT_SERVER_WIRE_RAPT_LINEAR_STREAM_CALL_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/timer.h"
#include "server/calls/call.h"
#include "server/protocols/rapt/linear_codec.h"
#include "server/request.h"
#include "server/wire/message_stream.h"

namespace rapt::native {

// One message at a time: the next one is read when the response to the previous one has been sent.
// Therefore a stream holds the state and the memory of one message, and HTTP/2 flow control applies
// backpressure to a faster sender. The first error ends the stream.
//
// Memory is admitted per message, as for LinearAttend; the state is a part of the memory of the
// message that made it. A caller that sends nothing for the default deadline is ended, and earlier
// if others wait for memory. A server that drains lets the stream go on.
//
// All steps run on the transport's thread; the alarm and the engine post theirs there.
class LinearStreamCall final : public StreamCall {
 public:
  // `observe` outlives the call.
  LinearStreamCall(const CallEnvironment& environment, const CallObserver& observe,
                   MessageStream& stream);

  void Begin() override;

 private:
  // The steps, each leading to the next; none after End().
  void WaitForMessage();
  void OnSize(int64_t bytes) override;
  void Receive(int64_t bytes, absl::StatusOr<MessageReservation> memory);
  void OnReadDone(bool ok) override;
  void Compute();
  void OnResult(Result result);
  void OnWriteDone(bool ok) override;
  void End(absl::Status status, Stage stage);

  void StartRead(int64_t max_bytes, AdmissionGate::Shares held);
  void EndRead();
  void OnAlarm();
  bool IsLate() const;
  bool GivesWay() const { return call_.receive_end() == Instant::min(); }  // to those who wait
  absl::Status TooSlow() const;
  void OnCancel() override { call_.Cancel(); }
  void OnDone() override;

  Call call_;
  LinearStream sequence_;
  MessageReservation kept_memory_;  // of the sequence
  IncomingMessage message_;         // while it is computed
  Instant silence_end_;             // a caller sends its next message before
  bool is_reading_ = false;
  bool has_size_ = false;  // the next message is being received, its memory admitted
  bool is_sending_ = false;
  bool has_left_ = false;  // the caller has half-closed or disconnected
  absl::Status status_;

  Alarm alarm_;  // the end of a transfer
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_LINEAR_STREAM_CALL_H_
