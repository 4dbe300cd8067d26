// AttendStream: an attention whose tensors come in chunks.
#ifndef RAPT_SERVER_WIRE_GRPC_RAPT_ATTEND_STREAM_CALL_H_
#define RAPT_SERVER_WIRE_GRPC_RAPT_ATTEND_STREAM_CALL_H_

#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/timer.h"
#include "server/attention_stream.h"
#include "server/calls/call_observer.h"
#include "server/engine.h"
#include "server/protocols/rapt/stream_codec.h"
#include "server/wire/grpc/generic_call.h"
#include "server/wire/grpc/received_message.h"

namespace rapt::native {

// One read is outstanding and one chunk is computed at a time, so that a chunk comes while the one
// before it is folded in; a chunk that has come waits, and nothing is read meanwhile. An answer is
// written at a time, and nothing is computed while two wait. Deletes itself.
//
// A read, a write, a step of the computation and the alarm may all end at once, on different
// threads. Each only tells so; what follows is done by one thread at a time, the one that found
// nobody else at it. So everything but the events belongs to that thread. The call is finished when
// nothing that it started is under way, but for a read, which gRPC then ends.
class AttendStreamCall final : public GenericCall {
 public:
  // `observe` outlives the call.
  AttendStreamCall(const CallEnvironment& environment, const CallObserver& observe,
                   std::unique_ptr<GrpcCall> call);

  void Begin() override;

 private:
  // What has happened and was not seen to yet.
  struct Events {
    bool any = false;
    std::optional<absl::StatusOr<MessageReservation>> header_admitted;
    std::optional<absl::Status> stream_admitted;
    std::optional<bool> read;     // whether there was a message
    std::optional<bool> written;  // whether it went out
    std::optional<StepResult> computed;
    bool rang = false;
    bool cancelled = false;
  };
  // A chunk that has come.
  struct Received {
    ReceivedMessage message;
    StreamChunk chunk;  // in the message
    bool streams = false;
  };

  Engine& engine() const { return environment_.engine; }
  Instant Now() const { return environment_.clock.Now(); }

  void Tell(absl::FunctionRef<void(Events&)> note);
  void See(Events events);
  // Starts whatever can be started. True when the call is finished and may be gone.
  bool Proceed();

  void OnRead(bool ok);
  absl::Status OpenStream();
  absl::Status TakeChunk();
  void OnComputed(StepResult result);
  void OnWritten(bool ok);
  void OnAlarm();
  void OnTimeOver();
  void SetAlarm();
  void OnStreamAdmitted(absl::Status status);

  bool MayRead() const;
  void Read();
  void ComputeNext();
  void ComputeChunk();
  void FinishRows();
  void TellOf(StepResult result);
  void WriteNext();
  void BeginSending();
  bool IsComplete() const;
  void FinishWell();
  void FinishBadly();
  void Fail(absl::Status status, Stage stage);
  Stage StageNow() const;
  absl::Status GivenUp() const;
  void Release();

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  const CallEnvironment& environment_;
  const CallObserver& observe_;
  const Instant arrived_;
  std::string caller_;  // empty until it is counted
  Instant deadline_;
  std::atomic<bool> caller_left_{false};
  std::atomic<bool> given_up_{false};     // the computation is in vain
  std::atomic<bool> is_answered_{false};  // but the end may not have left

  Mutex mutex_;
  Events events_ ABSL_GUARDED_BY(mutex_);
  bool is_attended_ ABSL_GUARDED_BY(mutex_) = false;  // some thread sees to the events

  MessageReservation header_place_;
  std::shared_ptr<AttentionStream> stream_;  // once the header has come
  std::optional<ChunkOrder> order_;          // of the stream's chunks; once it is admitted
  std::optional<Received> waiting_;
  std::optional<Received> computed_;  // that is being computed
  int64_t finished_rows_ = 0;         // of Y, where keys stream
  std::deque<AnswerMessage> answers_;
  bool is_admitting_ = false;
  bool is_reading_ = false;
  bool is_computing_ = false;
  bool is_writing_ = false;
  bool has_all_ = false;  // the caller has half-closed
  bool was_cut_ = false;  // a read failed before everything had come
  Instant admission_began_, read_began_, write_began_;
  Instant receive_end_, send_end_;

  absl::Status status_;
  CallReport report_;
  Problem problem_;  // of report_

  grpc::ByteBuffer incoming_;
  grpc::ByteBuffer outgoing_;
  Alarm alarm_;  // the end of a read, or of a write, or the deadline
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_GRPC_RAPT_ATTEND_STREAM_CALL_H_
