// A unary call over gRPC that carries tensors, of any protocol.
#ifndef RAPT_SERVER_WIRE_GRPC_TENSOR_CALL_H_
#define RAPT_SERVER_WIRE_GRPC_TENSOR_CALL_H_

#include <grpcpp/support/byte_buffer.h>

#include <memory>

#include "absl/status/status.h"
#include "base/clock.h"
#include "server/calls/unary_call.h"
#include "server/protocols/message_parts.h"
#include "server/request.h"
#include "server/wire/grpc/generic_call.h"
#include "server/wire/grpc/received_message.h"

namespace rapt {

// Deletes itself. A protocol's call derives from it: OnMessage() leads to Answer() or End(), once.
class TensorCall : public GenericCall, protected UnaryCall {
 public:
  void Begin() final;

 protected:
  // `observe` outlives the call.
  TensorCall(const CallEnvironment& environment, const CallObserver& observe,
             std::unique_ptr<GrpcCall> call);

  // The message has arrived. Leads to Answer() or End(), on any thread.
  virtual void OnMessage(const MessageBytes& message) = 0;

  Instant arrived() { return call().arrived(); }
  void Bind(Request& request) { call().Bind(request); }
  void Record(const Result& result) { call().Record(result); }

  // Finishes the call, as End() does: the message and this object must not be used afterwards.
  void Answer(AnswerMessage answer);
  using UnaryCall::End;

 private:
  void StartReading() final;
  void DropMessage() final { message_.Clear(); }
  void Finish(const absl::Status& status) final;
  void Abort() final { context().TryCancel(); }

  absl::Status TakeMessage();
  void OnReadDone(bool ok) final;
  void OnCancel() final { OnCancelled(); }
  void OnDone() final;

  grpc::ByteBuffer buffer_;  // the request, then the response
  ReceivedMessage message_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_TENSOR_CALL_H_
