// A unary call over HTTP/2.
#ifndef RAPT_SERVER_WIRE_HTTP2_UNARY_STREAM_H_
#define RAPT_SERVER_WIRE_HTTP2_UNARY_STREAM_H_

#include <array>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "base/byte_slice.h"
#include "server/calls/call_headers.h"
#include "server/calls/unary_call.h"
#include "server/protocols/message_parts.h"
#include "server/wire/http2/connection.h"
#include "server/wire/live_count.h"
#include "server/wire/unary_method.h"

namespace rapt {

// Reads the size of the message from its prefix, reserves that, and only then opens the stream's
// window. The message is in one buffer; the response references its outputs.
//
// Its own state belongs to the thread of the connection's loop; steps of UnaryCall that come from
// other threads are posted there. Deletes itself when the stream is closed and the call has ended.
class UnaryStream final : public CallStream, private UnaryCall, private MethodCall {
 public:
  // Everything but the connection outlives the call.
  UnaryStream(Connection& connection, int32_t id, const CallEnvironment& environment,
              BufferPool& pool, LiveCount& live_calls, const UnaryMethod& method);

  // `timeout` is that of the caller. Call it once, right after construction.
  void Begin(CallHeaders headers, std::chrono::nanoseconds timeout, bool has_encoding);

  void OnData(absl::Span<const uint8_t> bytes) override;
  void OnEnd() override;
  void OnClosed(bool has_responded) override;
  absl::Span<uint8_t> DirectPlace() override;
  void OnFramed(int64_t bytes) override { OnBytesSent(bytes); }
  bool carries_tensors() override { return call().traits().carries_tensors; }

 private:
  enum class State : uint8_t { kPrefix, kWaiting, kBody, kReceived };

  ~UnaryStream() override = default;

  Call& call() override { return UnaryCall::call(); }
  void Respond(ResponseMessage response) override;
  void End(absl::Status status) override { UnaryCall::End(std::move(status)); }

  void StartReading() override;
  void DropMessage() override { body_ = {}; }
  void Finish(const absl::Status& status) override;
  void Abort() override;

  void TakePrefix(absl::Span<const uint8_t>& bytes);
  absl::Status CheckPrefix() const;
  void HoldEarly(absl::Span<const uint8_t> bytes);
  void OpenBody();
  void TakeBody(absl::Span<const uint8_t> bytes);
  void OnWhole();
  void FailReading(absl::Status status);
  absl::Status MoreThanOneMessage() const;
  bool is_compressed() const { return prefix_bytes_ == prefix_.size() && prefix_[0] != 0; }
  void Delete();

  EventLoop& loop_;
  const std::weak_ptr<Connection> weak_connection_;
  Connection* connection_;  // null: the stream is closed
  const int32_t id_;
  BufferPool& pool_;
  LiveCount::Place place_;
  const std::unique_ptr<MessageHandler> handler_;

  State state_ = State::kPrefix;
  bool has_encoding_ = false;
  bool has_finished_ = false;  // Respond() or Finish() has run
  bool has_ended_ = false;     // the caller has half-closed
  bool has_surplus_ = false;   // more bytes than the message arrived early
  bool expects_ = false;       // the window is opened for the rest of the message
  std::array<uint8_t, 5> prefix_ = {};
  size_t prefix_bytes_ = 0;
  int64_t size_ = 0;   // of the message
  std::string early_;  // bytes that arrived before their memory was admitted
  MessageReservation early_memory_;
  PooledBuffer body_;
  int64_t received_ = 0;
  ByteSlice slice_ = {};
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_UNARY_STREAM_H_
