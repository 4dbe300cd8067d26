#ifndef RAPT_SERVER_WIRE_UNARY_STREAM_CALL_H_
#define RAPT_SERVER_WIRE_UNARY_STREAM_CALL_H_

#include <cstdint>
#include <memory>
#include <utility>

#include "absl/status/status.h"
#include "server/calls/unary_call.h"
#include "server/protocols/message_parts.h"
#include "server/wire/message_stream.h"
#include "server/wire/unary_method.h"

namespace rapt {

// A unary call: a stream of one message. Reads its size, reserves that, and only then its bytes.
class UnaryStreamCall final : public StreamCall, private UnaryCall, private MethodCall {
 public:
  // Everything outlives the call.
  UnaryStreamCall(const CallEnvironment& environment, const UnaryMethod& method,
                  MessageStream& stream)
      : StreamCall(stream),
        UnaryCall(environment, method.observe, method.traits),
        handler_(method.new_handler()) {}

  void Begin() override;

 private:
  void OnSize(int64_t bytes) override { UnaryCall::OnSize(bytes); }
  void OnBytesRead(int64_t bytes) override { UnaryCall::OnBytesRead(bytes); }
  void OnBytesSent(int64_t bytes) override { UnaryCall::OnBytesSent(bytes); }
  void OnReadDone(bool ok) override;
  void OnBadRead(absl::Status status) override { UnaryCall::OnBadRead(std::move(status)); }
  void OnWriteDone(bool /*ok*/) override {}
  void OnCancel() override { OnCancelled(); }
  void OnDone() override { OnClosed(); }

  void StartReading() override;
  void DropMessage() override { message_ = {}; }
  void Finish(const absl::Status& status) override { stream().StartFinish(status, call()); }
  void Abort() override { stream().Cancel(); }

  Call& call() override { return UnaryCall::call(); }
  void Respond(ResponseMessage response) override;
  void End(absl::Status status) override { UnaryCall::End(std::move(status)); }

  const std::unique_ptr<MessageHandler> handler_;
  IncomingMessage message_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_UNARY_STREAM_CALL_H_
