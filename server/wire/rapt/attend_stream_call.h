// AttendStream: a call whose tensors arrive in chunks.
#ifndef RAPT_SERVER_WIRE_RAPT_ATTEND_STREAM_CALL_H_
#define RAPT_SERVER_WIRE_RAPT_ATTEND_STREAM_CALL_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/timer.h"
#include "server/attention_stream.h"
#include "server/calls/call.h"
#include "server/protocols/rapt/stream_codec.h"
#include "server/wire/message_stream.h"

namespace rapt::native {

// One read is pending and one chunk is computed at a time, so that a chunk is received while the
// previous one is folded in. A received chunk waits for the previous one, and nothing is read
// meanwhile. One response is written at a time, and nothing is computed while two wait. Deletes
// itself.
//
// A read, a write, a step of the computation and the alarm may end concurrently, on different
// threads. Each only records its event. One thread at a time handles the events: the first one that
// finds no other thread handling them. Therefore all state except the events belongs to that
// thread. The call is finished when none of its operations is pending, except a read, which the
// transport then ends.
class AttendStreamCall final : public StreamCall {
 public:
  // `observe` outlives the call.
  AttendStreamCall(const CallEnvironment& environment, const CallObserver& observe,
                   MessageStream& stream);

  void Begin() override;

 private:
  // A received chunk.
  struct Received {
    IncomingMessage message;
    StreamChunk chunk;  // in the message
    bool streams = false;
  };

  using Event = absl::AnyInvocable<void()>;

  void Post(Event event);
  // Starts all operations that can start. Returns true if the call is finished and may be
  // destroyed.
  bool Proceed();

  void OnHeaderAdmitted(absl::StatusOr<MessageReservation> place);
  void OnRead(bool ok);
  void OnTooLarge(int64_t bytes);
  absl::Status OpenStream();
  absl::Status TakeChunk();
  void OnComputed(StepResult result);
  void OnWritten(bool ok);
  void OnAlarm();
  void HandleAlarm();
  void SetAlarm();
  Instant NextEnd() const;
  void OnStreamAdmitted(const absl::Status& status);

  bool MayRead() const;
  void Read();
  void ComputeNext();
  void ComputeChunk();
  void FinishRows();
  void PostResult(StepResult result);
  void WriteNext();
  void BeginSending(const ResponseMessage& message);
  AdmissionGate::Shares Held() const;
  bool IsComplete() const;
  void FinishOk();
  void FinishWithError();
  void Fail(absl::Status status, Stage stage);
  Stage StageNow() const;
  void Release();

  void OnSize(int64_t bytes) override;
  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override;
  void OnCancel() override;
  void OnDone() override;

  Call call_;
  std::atomic<bool> is_cancelled_{false};
  std::atomic<bool> has_responded_{false};  // the end of the stream may not have been sent yet

  Mutex mutex_;
  std::vector<Event> events_ ABSL_GUARDED_BY(mutex_);  // that are not handled yet
  bool is_handling_ ABSL_GUARDED_BY(mutex_) = false;   // a thread handles the events

  std::shared_ptr<AttentionStream> stream_;  // set by the header
  std::optional<ChunkOrder> order_;          // of the stream's chunks; set on admission
  std::optional<Received> waiting_;
  std::optional<Received> computed_;  // the one being computed
  int64_t finished_rows_ = 0;         // of Y, if keys stream
  std::deque<ResponseMessage> responses_;
  bool is_admitting_ = false;
  bool is_reading_ = false;
  bool is_computing_ = false;
  bool is_writing_ = false;
  bool is_half_closed_ = false;  // by the caller
  bool was_truncated_ = false;   // a read failed before the last chunk
  Instant admission_began_;
  absl::Status status_;

  Alarm alarm_;  // the end of a read, or of a write, or the deadline
};

}  // namespace rapt::native

#endif  // RAPT_SERVER_WIRE_RAPT_ATTEND_STREAM_CALL_H_
