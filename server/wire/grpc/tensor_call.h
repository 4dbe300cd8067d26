// A call that carries tensors, of whatever protocol.
#ifndef RAPT_SERVER_WIRE_GRPC_TENSOR_CALL_H_
#define RAPT_SERVER_WIRE_GRPC_TENSOR_CALL_H_

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
#include "server/protocols/message_parts.h"
#include "server/request.h"
#include "server/wire/grpc/generic_call.h"
#include "server/wire/grpc/received_message.h"

namespace rapt {

// One message each way, like a unary call, but it exists when the headers arrive: it is counted and
// has a place in the memory budget before a byte of the message is asked for. Deletes itself.
//
// Who ends a call is decided by its phase: while the message comes, the reader or the alarm,
// whoever changes the phase first; before, the admission; afterwards, the derived class, once.
class TensorCall : public GenericCall {
 public:
  void Begin() final;

 protected:
  // `observe` outlives the call.
  TensorCall(const CallEnvironment& environment, const CallObserver& observe,
             std::unique_ptr<GrpcCall> call);

  // The message is there: leads to Answer() or End(), on any thread.
  virtual void OnMessage(const MessageBytes& message) = 0;

  Engine& engine() const { return environment_.engine; }
  Instant arrived() const { return arrived_; }

  // Gives the request the call's deadline, where that is the earlier one, and its cancellation.
  void Bind(Request& request);

  // Tells in trailing metadata, and whoever observes, which backend and plan it was, as far as it
  // came to that, and where the time went.
  void TellOf(const Result& result);

  // Each finishes the call, and nothing of this object may be touched afterwards. The message must
  // not be read any more.
  void Answer(AnswerMessage answer);
  void End(absl::Status status);

 private:
  enum class Phase : uint8_t { kAdmitting, kReading, kReceived, kEvicted, kAnswering };

  absl::Status ReadHeaders();
  void OnAdmitted(absl::StatusOr<MessageReservation> reservation);
  absl::Status TakeMessage();
  void OnAlarm();
  void Evict();

  void OnReadDone(bool ok) final;
  void OnCancel() final;
  void OnDone() final;

  const CallEnvironment& environment_;
  const CallObserver& observe_;
  const Instant arrived_;
  std::string caller_;  // empty until it is counted
  Instant deadline_;
  Instant receive_end_;
  Instant send_end_;
  std::optional<int64_t> declared_bytes_;
  std::atomic<bool> cancelled_{false};
  std::atomic<Phase> phase_{Phase::kAdmitting};
  Instant stage_began_;
  CallReport report_;
  Problem problem_;  // of report_
  bool message_lost_ = false;

  MessageReservation reservation_;
  grpc::ByteBuffer buffer_;  // what is read, then what is written
  ReceivedMessage message_;
  Alarm alarm_;  // the end of receiving, then that of answering
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_TENSOR_CALL_H_
