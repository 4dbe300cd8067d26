// What all calls that carry tensors have in common, however many messages they have.
#ifndef RAPT_SERVER_WIRE_GRPC_GENERIC_CALL_H_
#define RAPT_SERVER_WIRE_GRPC_GENERIC_CALL_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/timer.h"
#include "server/calls/call_report.h"
#include "server/calls/open_calls.h"
#include "server/calls/stream_counts.h"
#include "server/engine.h"
#include "server/protocols/message_parts.h"
#include "server/wire/grpc/access.h"

namespace rapt {

// A caller that says here how many bytes its message has holds only those while it is sent, and not
// the most that a message may have.
inline constexpr char kMessageBytesHeader[] = "rapt-message-bytes";

struct CallLimits {
  int64_t max_message_bytes = 0;
  int64_t min_receive_bytes_per_second = 0;      // by us of messages, by callers of answers
  std::chrono::nanoseconds default_deadline{0};  // where the caller sets none
  std::chrono::nanoseconds max_deadline{0};
};

// What a protocol's calls work with; outlives them.
struct CallEnvironment {
  const Access& access;
  Engine& engine;
  OpenCalls& open_calls;
  StreamCounts& streams;
  Timer& timer;
  const Clock& clock;
  CallLimits limits;
};

// A call as gRPC has it: it is asked for one before one comes.
struct GrpcCall {
  virtual ~GrpcCall() = default;
  grpc::GenericServerContext context;
  grpc::GenericServerAsyncReaderWriter stream{&context};
};

// What the end of something leads to, on a thread of the completion queue. Its address is the tag.
using Completion = absl::AnyInvocable<void(bool ok)>;

// A call that exists when its headers arrive, before a byte of a message is asked for. Its messages
// are read and written from any thread, one of each at a time; what becomes of them it hears on
// threads of the completion queue, on several at once where there are several. OnDone comes last,
// once, when it is finished and nothing that was begun is under way, and deletes it.
class GenericCall {
 public:
  GenericCall(const GenericCall&) = delete;
  GenericCall& operator=(const GenericCall&) = delete;

  // Right after construction.
  virtual void Begin() = 0;

  // The caller has the answer, or has left. After Begin().
  void OnEnded();

 protected:
  explicit GenericCall(std::unique_ptr<GrpcCall> call);
  virtual ~GenericCall() = default;

  grpc::GenericServerContext& context() const { return call_->context; }

  // `message` stays until OnReadDone, OnWriteDone or OnDone.
  void StartRead(grpc::ByteBuffer* message);
  void StartWrite(const grpc::ByteBuffer* message);
  // Either of them, once, when nothing is being written.
  void StartWriteAndFinish(const grpc::ByteBuffer* message, const grpc::Status& status);
  void Finish(const grpc::Status& status);

  // OnDone does not come in between, whatever ends meanwhile.
  void Hold() { ++pending_; }
  void LetGo();

  virtual void OnReadDone(bool /*ok*/) {}
  virtual void OnWriteDone(bool /*ok*/) {}
  virtual void OnCancel() {}
  virtual void OnDone() = 0;

 private:
  const std::unique_ptr<GrpcCall> call_;
  // What OnDone waits for: at first OnEnded() and the finish; what is begun counts on top, so that
  // the thread that hears of its end sees what the one that began it has written.
  std::atomic<int> pending_{2};
  Completion read_, written_, finished_;
};

// Counts the call among the open ones of its caller, by whose name it leaves them. Unauthenticated,
// ResourceExhausted.
absl::StatusOr<std::string> EnterOpenCalls(const CallEnvironment& environment,
                                           const grpc::ServerContextBase& context);

// The caller's deadline, or the default, within the limits. DeadlineExceeded where it has passed.
absl::StatusOr<Instant> DeadlineOf(const grpc::ServerContextBase& context, Instant arrived,
                                   const CallLimits& limits);

// What the header rapt-message-bytes says that a message has at most. InvalidArgument where that is
// no number of bytes, ResourceExhausted where it is more than a message may have.
absl::StatusOr<std::optional<int64_t>> DeclaredBytes(const grpc::ServerContextBase& context,
                                                     const CallLimits& limits);
// What a message that has come must not exceed: InvalidArgument where that is what it was declared
// to have, ResourceExhausted where it is what any may have.
absl::Status CheckSize(int64_t message_bytes, std::optional<int64_t> declared_bytes,
                       const CallLimits& limits);

// When a message of so many bytes, whose reading begins now, comes too slowly.
Instant ReceiveEnd(Instant now, int64_t bytes, const CallLimits& limits);
// When an answer of so many bytes, which is sent from now on, is read too slowly; at the deadline
// at the latest.
Instant SendEnd(Instant now, int64_t bytes, Instant deadline, const CallLimits& limits);
// Of an answer that was not sent: ResourceExhausted where that took until `send_end`,
// DeadlineExceeded where that is the deadline, else Cancelled.
absl::Status NotSent(Instant now, Instant send_end, Instant deadline, const CallLimits& limits);

// Adds to the time that the call was in a stage.
void AddTime(Stage stage, std::chrono::nanoseconds time, CallReport& report);

// Tells the caller which backend and plan it was, and where the time went: nothing where it never
// came to a plan. `total` is since the call arrived.
void AddTrailers(const CallReport& report, std::chrono::nanoseconds total,
                 grpc::ServerContext& context);

// Refers to the outputs, and keeps them and their place in the budget until gRPC has sent them.
grpc::ByteBuffer ToByteBuffer(AnswerMessage answer);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_GENERIC_CALL_H_
