// The life of a call, independent of its transport and number of messages.
#ifndef RAPT_SERVER_CALLS_CALL_H_
#define RAPT_SERVER_CALLS_CALL_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/timer.h"
#include "server/calls/access.h"
#include "server/calls/call_headers.h"
#include "server/calls/call_report.h"
#include "server/calls/open_calls.h"
#include "server/calls/stream_counts.h"
#include "server/engine.h"

namespace rapt {

struct CallLimits {
  int64_t max_message_bytes = 0;
  // For requests received by the server and responses received by callers.
  int64_t min_receive_bytes_per_second = 0;
  std::chrono::nanoseconds default_deadline{0};  // if the caller sets none
  std::chrono::nanoseconds max_deadline{0};
};

// Such a message fits into the window that a stream has before it is read.
inline constexpr int64_t kMaxSmallMessageBytes = 64 * 1024;

// How a method treats its callers.
struct MethodTraits {
  // Without tensors: the message has at most `max_small_bytes` and waits for no memory; the
  // call is counted separately, so that health can be queried while tensor calls are at their
  // limit.
  bool carries_tensors = true;
  int64_t max_small_bytes = kMaxSmallMessageBytes;
  // Open to callers without a token.
  bool is_public = false;
  // Its messages are received until the grace period ends, and requests on caches are accepted.
  bool serves_while_draining = false;
};

// Dependencies of all calls; outlives them.
struct CallEnvironment {
  const Access& access;
  Engine& engine;
  OpenCalls& open_calls;
  OpenCalls& small_calls;  // calls without tensors
  StreamCounts& streams;
  Timer& timer;
  const Clock& clock;
  CallLimits limits;
};

// The caller's identity and place among the open calls, deadline and cancellation, memory of the
// message that is received, transfer rates, and the report. Independent of the transport, which
// reads, writes and finishes the call.
//
// Not thread-safe, except cancelled() and Cancel(). Destruction releases its place.
class Call {
 public:
  // A name and value sent to the caller at the end of the call.
  using Trailer = absl::FunctionRef<void(const char* name, const std::string& value)>;

  // The call has arrived. `observe` outlives it.
  Call(const CallEnvironment& environment, const CallObserver& observe, MethodTraits traits = {});
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  Engine& engine() const { return environment_.engine; }
  StreamCounts& streams() const { return environment_.streams; }
  Timer& timer() const { return environment_.timer; }
  const CallLimits& limits() const { return environment_.limits; }
  const MethodTraits& traits() const { return traits_; }
  Instant Now() const { return environment_.clock.Now(); }
  Instant arrived() const { return arrived_; }
  Instant deadline() const { return deadline_; }
  CallReport& report() { return report_; }

  // Records the trace and counts the call towards its caller's limit. Returns Unauthenticated or
  // ResourceExhausted on failure.
  absl::Status Enter(const CallHeaders& headers);
  // Sets the caller's deadline, or the default, but at most the maximum. Returns DeadlineExceeded
  // if it has passed.
  absl::Status SetDeadline(Instant requested);
  // The same without a default deadline, for streams.
  void SetStreamDeadline(Instant requested);

  // Call between the requests of a stream. The call keeps its place but does not count as open.
  // Starts the report of the next request.
  void MarkIdle();
  // Call when that request has arrived.
  void MarkActive();

  // Cancels the call: its request soon stops waiting or computing. Thread-safe.
  void Cancel();
  const std::atomic<bool>& cancelled() const { return cancelled_; }
  // The identity of the caller; empty before Enter().
  const std::string& caller() const { return caller_; }
  // The memory that the caller's calls hold; null before Enter().
  const std::shared_ptr<CallerMemory>& caller_memory() const { return caller_memory_; }
  // Returns whether nobody awaits the response: the call is cancelled or its deadline has passed.
  bool is_over() const { return cancelled_ || Now() >= deadline_; }
  // Returns DeadlineExceeded if the deadline has passed, otherwise Cancelled.
  absl::Status CancelledOrLate() const;

  // Returns ResourceExhausted if a message of the size exceeds the limit.
  absl::Status CheckMessageSize(int64_t bytes) const;
  // Reserves memory for a message, to be passed to KeepMessageMemory(). `admitted` as in
  // Engine::AdmitMessage().
  template <typename Admitted>
  void AdmitMessage(int64_t bytes, Admitted admitted) {
    is_accepted_ = engine().accepting();
    if (traits_.serves_while_draining) return AdmitNextMessage(bytes, std::move(admitted));
    engine().AdmitMessage(bytes, deadline_, cancelled_, caller_memory_, std::move(admitted));
  }
  // The same for a later message of a stream, which the server accepts while it drains.
  template <typename Admitted>
  void AdmitNextMessage(int64_t bytes, Admitted admitted) {
    engine().AdmitNextMessage(bytes, deadline_, cancelled_, caller_memory_, std::move(admitted));
  }
  void KeepMessageMemory(MessageReservation memory) {
    ReleaseMessageMemory();
    AddMessageMemory(std::move(memory));
  }
  // The same, beside what is kept.
  void AddMessageMemory(MessageReservation memory) {
    message_memory_bytes_ += memory.bytes();
    message_memory_.push_back(std::move(memory));
  }
  void ReleaseMessageMemory() {
    message_memory_bytes_ = 0;
    message_memory_.clear();
  }
  int64_t message_memory_bytes() const { return message_memory_bytes_; }

  // Call before the first message if NoteReceived() and NoteSent() follow: the call can then be
  // told from one of a peer that moves nothing, even if it is its caller's only one.
  void KeepPace() { keeps_pace_ = true; }
  // Call when the read of a message of at most `bytes` begins. The call holds memory of `held`. A
  // sender is too slow after receive_end(). If others wait for that memory and the caller holds
  // more than its fair share, receive_end() becomes earlier and `alarm` fires.
  void BeginReceiving(int64_t bytes, AdmissionGate::Shares held, Alarm& alarm);
  // Call when `bytes` of it have arrived.
  void NoteReceived(int64_t bytes) { Advance(receive_pace_, bytes); }
  void EndReceiving();
  Instant receive_end() const { return receive_yields_to_waiters_ ? Instant::min() : receive_end_; }
  // Returns the status that rejects the slow sender of `what`.
  absl::Status SlowSender(absl::string_view what) const;

  // Call when sending of `bytes` begins. A reader is too slow after send_end(), which is at most
  // `deadline` and becomes earlier like receive_end().
  void BeginSending(int64_t bytes, Instant deadline, AdmissionGate::Shares held, Alarm& alarm);
  // Call when the transport has accepted `bytes`.
  void NoteSent(int64_t bytes) { Advance(send_pace_, bytes); }
  void EndSending();
  Instant send_end() const { return send_yields_to_waiters_ ? Instant::min() : send_end_; }
  // Call before the alarms of BeginReceiving() and BeginSending() are destroyed.
  void EndWaits();
  // Returns the status of a response that was not sent: ResourceExhausted if sending took until
  // send_end(), DeadlineExceeded if that is the deadline, otherwise Cancelled.
  absl::Status NotSent() const;

  // Adds the time since `begin` to the stage.
  void AddTimeSince(Instant begin, Stage stage) { AddTime(stage, Now() - begin); }
  void AddTime(Stage stage, std::chrono::nanoseconds time);

  // Sets the request's deadline, unless it is earlier, and its cancellation to the call's. The
  // engine accepts the request if it has admitted its message. Reports its problem.
  void Bind(Request& request);
  void SetProblem(const Problem& problem);
  // Records backend, plan and times in the report.
  void Record(const Result& result);
  // Visits the traceparent, and backend, plan and times if the call has a plan.
  void ForEachTrailer(Trailer trailer) const;

  // Passes the report to the observer. Call once per request. Stages and bytes are those of tensor
  // calls.
  void Report(absl::Status status);

 private:
  AdmissionGate::PeerWait WaitForPeer(AdmissionGate::Shares held, std::chrono::nanoseconds patience,
                                      AdmissionGate::PeerPace& pace, std::atomic<bool>& yields,
                                      Alarm& alarm);
  void Advance(AdmissionGate::PeerPace& pace, int64_t bytes);
  OpenCalls& places() const {
    return traits_.carries_tensors ? environment_.open_calls : environment_.small_calls;
  }

  const CallEnvironment& environment_;
  const CallObserver& observe_;
  const MethodTraits traits_;
  std::string caller_;  // empty unless counted as open
  std::shared_ptr<CallerMemory> caller_memory_;
  std::atomic<bool> receive_yields_to_waiters_{false};
  std::atomic<bool> send_yields_to_waiters_{false};
  AdmissionGate::PeerPace receive_pace_, send_pace_;
  bool keeps_pace_ = false;
  AdmissionGate::PeerWait receive_wait_, send_wait_;
  bool is_idle_ = false;
  bool is_accepted_ = false;  // the request's message
  Instant arrived_;
  Instant deadline_ = Instant::max();
  std::atomic<bool> cancelled_{false};
  absl::InlinedVector<MessageReservation, 1> message_memory_;
  int64_t message_memory_bytes_ = 0;
  Instant receive_began_, receive_end_;
  Instant send_began_, send_end_, send_deadline_;
  CallReport report_;
  Problem problem_;  // of report_
};

}  // namespace rapt

#endif  // RAPT_SERVER_CALLS_CALL_H_
