#ifndef RAPT_SERVER_WIRE_HTTP2_HTTP2_STREAM_H_
#define RAPT_SERVER_WIRE_HTTP2_HTTP2_STREAM_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "base/byte_slice.h"
#include "server/wire/http2/connection.h"
#include "server/wire/live_count.h"
#include "server/wire/message_stream.h"

namespace rapt {

// A MessageStream over HTTP/2. While no message is read, the caller may send as much as the initial
// window of a stream; it is charged to the budget. A message that is read has its own buffer, and
// the window opens for it.
//
// A unary call sends exactly one message. Its bad framing is told to it, so that it ends with a
// status.
//
// Its state belongs to the thread of the connection's loop, where the calls of other threads are
// posted. Deletes itself when the stream is closed, the call has finished, and nothing is posted.
class Http2Stream final : public CallStream, private MessageStream {
 public:
  struct Traits {
    bool is_unary = false;
    bool carries_tensors = false;  // see CallStream
    bool has_encoding = false;     // the caller may compress messages
  };

  // Everything but the connection outlives this.
  Http2Stream(Connection& connection, int32_t id, const Traits& traits, Engine& engine,
              BufferPool& pool, LiveCount& live);

  // Begins the call. `headers` need to be valid during this only. Call it once.
  void Serve(absl::FunctionRef<std::unique_ptr<StreamCall>(MessageStream&)> new_call,
             const CallHeaders& headers, std::chrono::nanoseconds timeout);

  void OnData(absl::Span<const uint8_t> bytes) override;
  void OnEnd() override;
  void OnClosed(bool has_responded) override;
  absl::Span<uint8_t> DirectPlace() override;
  bool carries_tensors() override { return traits_.carries_tensors; }
  void OnFramed(int64_t bytes) override { call_->OnBytesSent(bytes); }
  void OnDrained() override;

 private:
  // A message's buffer, and where it lies.
  struct Body {
    PooledBuffer buffer;
    ByteSlice slice;
  };

  ~Http2Stream() = default;

  CallHeaders Headers(Instant now) const override;
  void StartRead(int64_t max_bytes) override;
  IncomingMessage TakeMessage() override;
  void StartWrite(ResponseMessage message) override;
  void StartWriteAndFinish(ResponseMessage message, const Call& call) override;
  void StartFinish(const absl::Status& status, const Call& call) override;
  void Post(absl::AnyInvocable<void()> task) override;
  void Cancel() override;

  // Runs the task on the loop's thread; this stays alive until then.
  template <typename Task>
  void Run(Task task);
  void Ref() { ++pending_; }
  void Unref();

  bool takes() const { return is_reading_ && !is_bad_; }
  bool is_compressed() const { return prefix_bytes_ == prefix_.size() && prefix_[0] != 0; }
  bool is_whole() const { return body_ != nullptr && received_ == size_; }
  void Proceed();
  void TakeEarly();
  absl::Span<const uint8_t> Take(absl::Span<const uint8_t> bytes);
  void OpenBody();
  void HoldEarly(absl::Span<const uint8_t> bytes);
  void OpenWindow();
  void EndRead(bool ok);
  void FailRead(absl::Status status, uint32_t reset_code);
  absl::Status CompressedMessage() const;

  EventLoop& loop_;
  const std::weak_ptr<Connection> weak_connection_;
  Connection* connection_;  // null: the stream is closed
  const int32_t id_;
  const Traits traits_;
  Engine& engine_;
  BufferPool& pool_;
  const LiveCount::Place place_;
  std::unique_ptr<StreamCall> call_;
  const CallHeaders* headers_ = nullptr;
  std::chrono::nanoseconds timeout_{0};

  std::atomic<int> pending_{2};  // the end of the stream and that of the call, and what is posted
  bool has_ended_ = false;       // the caller has half-closed
  bool has_finished_ = false;
  bool is_reading_ = false;
  bool is_taking_ = false;  // bytes are being taken further up the stack
  bool is_writing_ = false;
  bool is_bad_ = false;       // the caller's framing; nothing more is read
  bool has_message_ = false;  // that of a unary call has been read
  bool expects_ = false;      // the window is opened
  int64_t max_bytes_ = 0;

  std::array<uint8_t, 5> prefix_ = {};
  size_t prefix_bytes_ = 0;
  int64_t size_ = 0;  // of the message, once the prefix is complete
  std::shared_ptr<Body> body_;
  int64_t received_ = 0;
  std::string early_;
  MessageReservation early_memory_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_HTTP2_STREAM_H_
