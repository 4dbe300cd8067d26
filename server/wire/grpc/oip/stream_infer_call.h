// ModelStreamInfer: a sequence of requests on one call.
#ifndef RAPT_SERVER_WIRE_GRPC_OIP_STREAM_INFER_CALL_H_
#define RAPT_SERVER_WIRE_GRPC_OIP_STREAM_INFER_CALL_H_

#include <grpcpp/support/byte_buffer.h>

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
#include "server/wire/grpc/generic_call.h"
#include "server/wire/grpc/received_message.h"

namespace rapt::oip {

// One request at a time: the next one is read when the answer to the previous one has been sent. So
// answers come in the order of requests, a stream holds the memory of one request only, and HTTP/2
// flow control applies backpressure to a faster sender. An invalid request is answered by an
// error_message in its place; the stream continues. It ends when the caller has half-closed it and
// has all answers.
//
// A stream may be silent for hours and holds no memory then. The size of its next message is the
// one that the caller declared, or else a guess from the previous message: memory of that size is
// reserved before the read begins, and kept for kReservationTime. A message that comes later, or is
// larger, has arrived completely before memory could be requested; it is charged to the budget
// nevertheless, so that other calls wait.
//
// A caller that reads an answer too slowly, or not within the default deadline, loses the stream.
//
// The stream has a place among its caller's open calls from its arrival, and is idle between
// requests, so that a silent one does not delay the drain of the server. Each request is reported
// on its own. Deletes itself.
class StreamInferCall final : public GenericCall {
 public:
  // Enough for a caller that sends the next request when it has the answer.
  static constexpr std::chrono::seconds kReservationTime{2};

  // `observe` and `shared_memory` outlive the call.
  StreamInferCall(const CallEnvironment& environment, const SharedMemory& shared_memory,
                  const CallObserver& observe, std::unique_ptr<GrpcCall> call);

  void Begin() override;

 private:
  absl::Status ReadHeaders(const CallHeaders& headers);

  // The steps, each leading to the next on any thread; none after FinishStream().
  void Wait();
  void Read(absl::StatusOr<MessageReservation> memory);
  void Refuse(absl::Status status);
  void OnReadDone(bool ok) override;
  absl::Status TakeMessage();
  absl::Status Decode();
  void OnResult(Result result);
  void Answer(AnswerMessage answer);
  void AnswerError(absl::Status status);
  void OnWriteDone(bool ok) override;

  void FinishStream(const absl::Status& status);
  void OnAlarm();
  void OnCancel() override { call_.Cancel(); }
  void OnDone() override;

  const SharedMemory& shared_memory_;
  Call call_;
  int64_t expected_bytes_ = 0;  // of the next message
  bool is_reading_ = false;     // changed while the alarm is not set

  // Of the request in progress.
  ReceivedMessage message_;
  DecodedInfer decoded_;
  absl::Status status_;

  grpc::ByteBuffer buffer_;  // the request, then the response
  Alarm alarm_;  // the end of the reservation, then of the stream; Call::send_end() while it writes
};

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_GRPC_OIP_STREAM_INFER_CALL_H_
