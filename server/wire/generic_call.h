// What all calls that carry tensors have in common, however many messages they have.
#ifndef RAPT_SERVER_WIRE_GENERIC_CALL_H_
#define RAPT_SERVER_WIRE_GENERIC_CALL_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/support/byte_buffer.h>

#include <chrono>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "server/base/clock.h"
#include "server/base/timer.h"
#include "server/call_report.h"
#include "server/engine.h"
#include "server/wire/access.h"
#include "server/wire/message_parts.h"
#include "server/wire/open_calls.h"
#include "server/wire/stream_counts.h"

namespace rapt {

struct CallLimits {
  int64_t max_message_bytes = 0;
  int64_t min_receive_bytes_per_second = 0;
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

// A call that exists when its headers arrive, before a byte of a message is asked for. Deletes
// itself.
class GenericCall : public grpc::ServerGenericBidiReactor {
 public:
  // Right after construction. The call may be gone when this returns.
  virtual void Begin() = 0;
};

// Counts the call among the open ones of its caller, by whose name it leaves them. Unauthenticated,
// ResourceExhausted.
absl::StatusOr<std::string> EnterOpenCalls(const CallEnvironment& environment,
                                           const grpc::ServerContextBase& context);

// The caller's deadline, or the default, within the limits. DeadlineExceeded where it has passed.
absl::StatusOr<Instant> DeadlineOf(const grpc::ServerContextBase& context, Instant arrived,
                                   const CallLimits& limits);

// When a message of so many bytes, whose reading begins now, comes too slowly.
Instant ReceiveEnd(Instant now, int64_t bytes, const CallLimits& limits);

// Adds to the time that the call was in a stage.
void AddTime(Stage stage, std::chrono::nanoseconds time, CallReport& report);

// Tells the caller which backend and plan it was, and where the time went: nothing where it never
// came to a plan. `total` is since the call arrived.
void AddTrailers(const CallReport& report, std::chrono::nanoseconds total,
                 grpc::GenericCallbackServerContext& context);

// Refers to the outputs, and keeps them and their place in the budget until gRPC has sent them.
grpc::ByteBuffer ToByteBuffer(AnswerMessage answer);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GENERIC_CALL_H_
