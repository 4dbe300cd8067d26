// A unary call over gRPC that carries tensors, of any protocol.
#ifndef RAPT_SERVER_WIRE_GRPC_TENSOR_CALL_H_
#define RAPT_SERVER_WIRE_GRPC_TENSOR_CALL_H_

#include <grpcpp/support/byte_buffer.h>

#include <memory>

#include "absl/status/status.h"
#include "server/calls/unary_call.h"
#include "server/protocols/message_parts.h"
#include "server/wire/grpc/generic_call.h"
#include "server/wire/grpc/received_message.h"
#include "server/wire/unary_method.h"

namespace rapt {

// Deletes itself.
class TensorCall final : public GenericCall, private UnaryCall, private MethodCall {
 public:
  // `method` outlives the call.
  TensorCall(const CallEnvironment& environment, const UnaryMethod& method,
             std::unique_ptr<GrpcCall> call);

  void Begin() override;

 private:
  Call& call() override { return UnaryCall::call(); }
  void Respond(ResponseMessage response) override;
  void End(absl::Status status) override;

  void StartReading() override;
  void DropMessage() override { message_.Clear(); }
  void Finish(const absl::Status& status) override;
  void Abort() override { context().TryCancel(); }

  absl::Status TakeMessage();
  void OnReadDone(bool ok) override;
  void OnCancel() override { OnCancelled(); }
  void OnDone() override;

  const std::unique_ptr<MessageHandler> handler_;
  grpc::ByteBuffer buffer_;  // the request, then the response
  ReceivedMessage message_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_TENSOR_CALL_H_
