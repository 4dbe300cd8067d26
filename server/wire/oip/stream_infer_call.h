// ModelStreamInfer: a sequence of requests on one call.
#ifndef RAPT_SERVER_WIRE_OIP_STREAM_INFER_CALL_H_
#define RAPT_SERVER_WIRE_OIP_STREAM_INFER_CALL_H_

#include <chrono>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/timer.h"
#include "server/calls/call.h"
#include "server/protocols/oip/codec.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/message_stream.h"

namespace rapt::oip {

// One request at a time: the next one is read when the response to the previous one has been sent.
// Therefore responses are in the order of requests, a stream holds the memory of one request only,
// and HTTP/2 flow control applies backpressure to a faster sender. An invalid request gets an
// error_message in its position; the stream continues. It ends when the caller has half-closed it
// and has received all responses.
//
// A stream may be silent for hours and then holds no memory. The size of its next message is the
// size that the caller declared, otherwise that of the previous message. Memory of that size is
// reserved before the read begins and held for kReservationTime. A message that arrives later or is
// larger is complete before memory can be requested; it is charged to the budget nevertheless, so
// that other calls wait.
//
// The stream is cancelled if its caller reads a response too slowly or not within the default
// deadline.
//
// The stream has a place among its caller's open calls from its arrival, and is idle between
// requests, so that a silent one does not delay the drain of the server. Each request is reported
// on its own. Deletes itself.
class StreamInferCall final : public StreamCall {
 public:
  // Enough for a caller that sends the next request when it has received the response.
  static constexpr std::chrono::seconds kReservationTime{2};

  // `observe` and `shared_memory` outlive the call.
  StreamInferCall(const CallEnvironment& environment, const SharedMemory& shared_memory,
                  const CallObserver& observe, MessageStream& stream);

  void Begin() override;

 private:
  absl::Status ReadHeaders(const CallHeaders& headers);

  // The steps, each leading to the next on any thread; none after FinishStream().
  void Wait();
  void Read(absl::StatusOr<MessageReservation> memory);
  void Refuse(absl::Status status);
  void OnSize(int64_t bytes) override;
  void OnReadDone(bool ok) override;
  absl::Status TakeMessage();
  absl::Status Decode();
  void OnResult(Result result);
  void Respond(ResponseMessage response);
  void RespondWithError(absl::Status status);
  void OnWriteDone(bool ok) override;

  void FinishStream(const absl::Status& status);
  void OnAlarm();
  void OnCancel() override { call_.Cancel(); }
  void OnDone() override;

  const SharedMemory& shared_memory_;
  Call call_;
  int64_t expected_bytes_ = 0;  // of the next message
  bool has_size_ = false;       // the next message is being received, its memory admitted
  bool is_reading_ = false;     // changed while the alarm is not set

  // Of the request in progress.
  IncomingMessage message_;
  DecodedInfer decoded_;
  absl::Status status_;

  Alarm alarm_;  // the end of the reservation, then of the stream; Call::send_end() while it writes
};

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_OIP_STREAM_INFER_CALL_H_
