// ModelStreamInfer: requests that follow one another on one call.
#ifndef RAPT_SERVER_WIRE_GRPC_OIP_STREAM_INFER_CALL_H_
#define RAPT_SERVER_WIRE_GRPC_OIP_STREAM_INFER_CALL_H_

#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/timer.h"
#include "server/calls/call_observer.h"
#include "server/engine.h"
#include "server/protocols/oip/codec.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/grpc/generic_call.h"
#include "server/wire/grpc/received_message.h"

namespace rapt::oip {

// One request at a time: the next is read when the answer to the one before has left, so that
// answers come in the order of requests, a stream holds the memory of one request only, and
// HTTP/2's flow control holds back who sends faster. What is wrong with a request is the
// error_message in its place; the stream goes on. It ends when the caller has half-closed it and
// has all answers.
//
// A stream may be silent for hours and holds nothing then. What its next message may have is known
// where the caller declared it, and else guessed from the message before: a place for so much is
// taken before the read begins, and kept for kPlaceTime. What comes later than that, or is larger,
// has come whole before anybody could ask; it is charged to the budget as it is, lest others come
// beside it.
//
// A caller that reads an answer too slowly, or not within the default deadline, loses the stream.
//
// The stream has its caller's place among the calls from its arrival, and rests between requests:
// a silent one is not held against a server that drains. Each request is reported on its own.
// Deletes itself.
class StreamInferCall final : public GenericCall {
 public:
  // Enough for a caller that sends on when it has its answer.
  static constexpr std::chrono::seconds kPlaceTime{2};

  // `observe` and `shared_memory` outlive the call.
  StreamInferCall(const CallEnvironment& environment, const SharedMemory& shared_memory,
                  const CallObserver& observe, std::unique_ptr<GrpcCall> call);

  void Begin() override;

 private:
  Engine& engine() const { return environment_.engine; }
  Instant Now() const { return environment_.clock.Now(); }

  absl::Status ReadHeaders();

  // The steps, each leading to the next on whatever thread; none after Finish().
  void Wait();
  void Read(absl::StatusOr<MessageReservation> place);
  void Refuse(const absl::Status& status);
  void OnReadDone(bool ok) override;
  absl::Status TakeMessage();
  absl::Status Decode();
  void OnResult(Result result);
  void Answer(AnswerMessage answer);
  void AnswerError(absl::Status status);
  void OnWriteDone(bool ok) override;

  void OnAlarm();
  void Report();
  void OnCancel() override;
  void OnDone() override;

  const CallEnvironment& environment_;
  const SharedMemory& shared_memory_;
  const CallObserver& observe_;
  std::string caller_;  // empty until it is counted
  std::string traceparent_;
  const Instant began_;
  Instant deadline_;  // of the stream
  std::optional<int64_t> declared_bytes_;
  int64_t expected_bytes_ = 0;  // of the next message
  std::atomic<bool> cancelled_{false};
  bool is_reading_ = false;  // changed while the alarm is not set

  // Of the request that is worked on.
  Instant arrived_;
  Instant stage_began_;
  Instant answer_deadline_;
  Instant send_end_;
  MessageReservation reservation_;
  ReceivedMessage message_;
  DecodedInfer decoded_;
  CallReport report_;
  Problem problem_;  // of report_

  grpc::ByteBuffer buffer_;  // what is read, then what is written
  Alarm alarm_;              // the end of the place, then of the stream; send_end_ while it writes
};

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_GRPC_OIP_STREAM_INFER_CALL_H_
