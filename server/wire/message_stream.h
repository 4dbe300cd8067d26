// A call with any number of messages in each direction, independent of the transport.
#ifndef RAPT_SERVER_WIRE_MESSAGE_STREAM_H_
#define RAPT_SERVER_WIRE_MESSAGE_STREAM_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "server/calls/call.h"
#include "server/calls/call_headers.h"
#include "server/protocols/message_parts.h"

namespace rapt {

// A received message, which owns its bytes.
struct IncomingMessage {
  MessageBytes bytes;
  std::shared_ptr<const void> owner;
};

// The transport's side of a call. Thread-safe, one read and one write at a time. Results come to
// the StreamCall.
class MessageStream {
 public:
  // Valid during StreamCall::Begin().
  virtual CallHeaders Headers(Instant now) const = 0;

  // Leads to OnReadDone(), or to OnSize() if the message has more than `max_bytes`; StartRead() may
  // then be called again with its size. -1: OnSize() comes for an empty message too. No effect
  // after the call has finished.
  virtual void StartRead(int64_t max_bytes) = 0;
  // Returns the message after OnReadDone(true).
  virtual IncomingMessage TakeMessage() = 0;
  // Leads to OnWriteDone() when the caller has read the message, except for bytes in transit.
  virtual void StartWrite(ResponseMessage message) = 0;

  // Call one of these two once, while no write is pending. A call adds its trailers.
  virtual void StartWriteAndFinish(ResponseMessage message, const Call& call) = 0;
  virtual void StartFinish(const absl::Status& status, const Call& call) = 0;

  // Runs the task on the thread that calls OnReadDone(), which keeps the call until then. REQUIRES:
  // the call has not finished.
  virtual void Post(absl::AnyInvocable<void()> task) = 0;

  // Cancels the call.
  virtual void Cancel() = 0;

 protected:
  ~MessageStream() = default;
};

// A method's side of a call. Called on the transport's threads, possibly concurrently.
class StreamCall {
 public:
  explicit StreamCall(MessageStream& stream) : stream_(stream) {}
  virtual ~StreamCall() = default;
  StreamCall(const StreamCall&) = delete;
  StreamCall& operator=(const StreamCall&) = delete;

  // Called once, right after construction.
  virtual void Begin() = 0;

  virtual void OnSize(int64_t bytes) = 0;
  // Bytes of the message that is read, or written.
  virtual void OnBytesRead(int64_t /*bytes*/) {}
  virtual void OnBytesSent(int64_t /*bytes*/) {}
  virtual void OnReadDone(bool ok) = 0;
  // Comes instead for a unary call whose message can't be read; a stream is reset.
  virtual void OnBadRead(absl::Status /*status*/) {}
  virtual void OnWriteDone(bool ok) = 0;
  // The caller has left, or Cancel() was called.
  virtual void OnCancel() = 0;
  // The call is finished and no operation is pending. Comes last; the call is then destroyed.
  virtual void OnDone() = 0;

 protected:
  MessageStream& stream() const { return stream_; }

 private:
  MessageStream& stream_;
};

// By path.
using StreamMethods =
    absl::flat_hash_map<std::string,
                        std::function<std::unique_ptr<StreamCall>(MessageStream& stream)>>;

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_MESSAGE_STREAM_H_
