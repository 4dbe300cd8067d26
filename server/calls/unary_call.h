// The life of a call with one message in each direction, independent of its transport.
#ifndef RAPT_SERVER_CALLS_UNARY_CALL_H_
#define RAPT_SERVER_CALLS_UNARY_CALL_H_

#include <atomic>
#include <cstdint>
#include <optional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/timer.h"
#include "server/calls/call.h"

namespace rapt {

// The call exists when its headers arrive: it is counted and has memory for its message before any
// of it is read.
//
// One atomic phase decides which event ends the call: the admission while it waits; then the read
// or the alarm, whichever changes the phase first; after that, the handler of the message, once.
//
// A transport derives from it, implements the steps and calls the events.
class UnaryCall {
 protected:
  // `observe` outlives the call.
  UnaryCall(const CallEnvironment& environment, const CallObserver& observe,
            MethodTraits traits = {});
  virtual ~UnaryCall() = default;

  // Steps. StartReading() leads to OnReadingStarted() and, at any time, to OnRead(). DropMessage()
  // frees the message. Finish() ends the call without a response; this object must not be used
  // afterwards. Abort() aborts the sending of a response.
  virtual void StartReading() = 0;
  virtual void DropMessage() = 0;
  virtual void Finish(const absl::Status& status) = 0;
  virtual void Abort() = 0;

  // Events.
  // OnSize() follows when the size of the message is known, or OnRead(false) if the caller ends the
  // call. `extra_bytes` of memory are reserved with it.
  void OnHeaders(const CallHeaders& headers);
  void OnSize(int64_t bytes, int64_t extra_bytes = 0);
  // Call instead of OnRead() if the message has `bytes` more, at most, or needs `extra_bytes` more
  // of memory. Leads to StartReading(), or ends the call if there is no memory for them soon.
  void OnMore(int64_t bytes, int64_t extra_bytes = 0);
  // Call after the read has been started. Returns false if it ended the call, which may be
  // destroyed by now. REQUIRES: no other thread destroys the call while this runs.
  bool OnReadingStarted();
  // Returns true if the message has arrived and the call continues; false if it ends or has ended.
  // `bytes`: of the message; by default, what OnSize() said.
  bool OnRead(bool ok, std::optional<int64_t> bytes = std::nullopt);
  // Call when bytes of the message have arrived, and when the transport has accepted bytes of the
  // response.
  void OnBytesRead(int64_t bytes) { call_.NoteReceived(bytes); }
  void OnBytesSent(int64_t bytes) { call_.NoteSent(bytes); }
  // Call instead of OnRead() if the message can't be received. Ends the call with the status.
  void OnBadRead(absl::Status status);
  void OnCancelled() { call_.Cancel(); }
  // Call when the transport has closed the call. Reports it.
  void OnClosed();

  // Call when sending of a response of `bytes` begins. Releases the message.
  void BeginResponse(int64_t bytes);
  // Ends the call without a response.
  void End(absl::Status status);

  Engine& engine() const { return call_.engine(); }
  Call& call() { return call_; }

 private:
  enum class Phase : uint8_t { kAdmitting, kReading, kReceived, kEvicted, kResponding };

  absl::Status Open(const CallHeaders& headers);
  void Admit(int64_t bytes, int64_t extra_bytes, bool is_first);
  bool EndReading();
  void OnAdmitted(absl::StatusOr<MessageReservation> memory, int64_t bytes, bool is_first);
  absl::Status NoMoreMemory(absl::Status status) const;
  void OnAlarm();
  bool Evict();
  void ReleaseMessage();

  Call call_;
  std::atomic<Phase> phase_{Phase::kAdmitting};
  Instant admission_began_;
  int64_t message_bytes_ = 0;           // that were announced
  MessageReservation response_memory_;  // of a small call
  bool message_lost_ = false;
  absl::Status status_;
  Alarm alarm_;  // the end of receiving, then that of sending
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_UNARY_CALL_H_
