// ModelStreamInfer: requests that follow one another on one call.
#ifndef RAPT_SERVER_WIRE_OIP_STREAM_INFER_CALL_H_
#define RAPT_SERVER_WIRE_OIP_STREAM_INFER_CALL_H_

#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/base/timer.h"
#include "server/engine.h"
#include "server/request.h"
#include "server/shared_memory/shared_memory.h"
#include "server/wire/call_observer.h"
#include "server/wire/generic_call.h"
#include "server/wire/oip/codec.h"
#include "server/wire/received_message.h"

namespace rapt::oip {

// One request at a time: the next is read when the answer to the one before has left, so that
// answers come in the order of requests, a stream holds the memory of one request only, and
// HTTP/2's flow control holds back who sends faster. What is wrong with a request is the
// error_message in its place; the stream goes on. It ends when the caller has half-closed it and
// has all answers.
//
// A stream may be silent for long, so that it can't hold a place for the largest message meanwhile:
// it holds kWaitingBytes. A larger message is admitted once it is there, before it is looked at.
//
// Each request is counted as an open call while it is worked on, and reported on its own; a silent
// stream is neither open nor held against a server that drains. Deletes itself.
class StreamInferCall final : public GenericCall {
 public:
  static constexpr int64_t kWaitingBytes = 1 << 20;

  // `observe` and `shared_memory` outlive the call.
  StreamInferCall(const CallEnvironment& environment, const SharedMemory& shared_memory,
                  const CallObserver& observe, std::unique_ptr<GrpcCall> call);

  void Begin() override;

 private:
  Engine& engine() const { return environment_.engine; }
  Instant Now() const { return environment_.clock.Now(); }

  // The steps, each leading to the next on whatever thread; none after Finish().
  void Wait();
  void Read(absl::StatusOr<MessageReservation> place);
  void Refuse(const absl::Status& status);
  void OnReadDone(bool ok) override;
  void Admit();
  void Infer(absl::StatusOr<MessageReservation> place);
  absl::Status Decode();
  void OnResult(Result result);
  void Answer(AnswerMessage answer);
  void AnswerError(absl::Status status);
  void OnWriteDone(bool ok) override;

  void Report();
  void OnCancel() override;
  void OnDone() override;

  const CallEnvironment& environment_;
  const SharedMemory& shared_memory_;
  const CallObserver& observe_;
  std::string caller_;
  std::string traceparent_;
  const Instant began_;
  Instant deadline_;
  std::atomic<bool> cancelled_{false};

  // Of the request that is worked on.
  Instant arrived_;
  Instant stage_began_;
  bool is_open_ = false;  // counted as an open call
  MessageReservation reservation_;
  ReceivedMessage message_;
  DecodedInfer decoded_;
  CallReport report_;
  Problem problem_;  // of report_

  grpc::ByteBuffer buffer_;  // what is read, then what is written
  Alarm alarm_;              // the deadline of the stream
};

}  // namespace rapt::oip

#endif  // RAPT_SERVER_WIRE_OIP_STREAM_INFER_CALL_H_
