// A call over HTTP/1.1.
#ifndef RAPT_SERVER_WIRE_HTTP_HTTP_CALL_H_
#define RAPT_SERVER_WIRE_HTTP_HTTP_CALL_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/types/span.h"
#include "base/buffer_pool.h"
#include "base/byte_slice.h"
#include "server/calls/unary_call.h"
#include "server/protocols/message_parts.h"
#include "server/wire/http/call_method.h"
#include "server/wire/http/connection.h"
#include "server/wire/http/router.h"
#include "server/wire/live_count.h"

namespace rapt::http {

// Reserves memory for the body before any of it is read: exactly that of a body with a length, that
// of a slab after another of a chunked one. What the handler needs in addition is reserved with a
// length, or after the last slab. The response references its outputs.
//
// Its own state belongs to the thread of the connection's loop; steps of UnaryCall that come from
// other threads are posted there. Deletes itself when the connection has left it and the call has
// ended.
class HttpCall final : public ConnectionCall, private UnaryCall, private MethodCall {
 public:
  // Everything but the connection outlives the call.
  HttpCall(Connection& connection, const CallEnvironment& environment, BufferPool& pool,
           LiveCount& live_calls, CalledMethod called);

  void Begin(const Request& request) override;
  absl::Span<uint8_t> BodyPlace() override;
  void OnBodyBytes(size_t count) override {
    received_ += static_cast<int64_t>(count);
    OnBytesRead(static_cast<int64_t>(count));
  }
  void OnBodyEnd() override;
  void OnBadBody() override;
  void OnBytesWritten(int64_t bytes) override { OnBytesSent(bytes); }
  void OnClosed(bool has_responded) override;

 private:
  // Memory of a part of the body.
  struct Slab {
    PooledBuffer buffer;
    int64_t begin = 0;  // within the body
  };

  ~HttpCall() override = default;

  Call& call() override { return UnaryCall::call(); }
  void Respond(ResponseHead head, ResponseMessage body) override;
  void End(absl::Status status) override { UnaryCall::End(std::move(status)); }

  void StartReading() override;
  void DropMessage() override { slabs_.clear(); }
  void Finish(const absl::Status& status) override;
  void Abort() override;

  int64_t SlabBytes();
  void OpenSlab();
  void HandleBody();
  void Delete();

  EventLoop& loop_;
  const std::weak_ptr<Connection> weak_connection_;
  Connection* connection_;  // null: the connection has left
  const uint64_t number_;   // of the connection's call
  BufferPool& pool_;
  const LiveCount::Place place_;
  const CalledMethod called_;
  std::unique_ptr<BodyHandler> handler_;

  bool is_chunked_ = false;
  bool is_whole_ = false;  // a chunked body has arrived
  bool is_reading_ = false;
  bool has_finished_ = false;  // Respond() or Finish() has run
  int64_t admitted_ = 0;       // bytes of the body
  int64_t received_ = 0;
  std::vector<Slab> slabs_;
  std::vector<ByteSlice> slices_;
};

}  // namespace rapt::http

#endif  // RAPT_SERVER_WIRE_HTTP_HTTP_CALL_H_
