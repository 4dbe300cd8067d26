// The base of all gRPC calls with tensors, unary and streaming.
#ifndef RAPT_SERVER_WIRE_GRPC_GENERIC_CALL_H_
#define RAPT_SERVER_WIRE_GRPC_GENERIC_CALL_H_

#include <grpcpp/generic/async_generic_service.h>
#include <grpcpp/support/byte_buffer.h>

#include <atomic>
#include <memory>

#include "absl/functional/any_invocable.h"
#include "server/calls/call.h"
#include "server/protocols/message_parts.h"

namespace rapt {

// gRPC's objects of a call, created before the call arrives.
struct GrpcCall {
  virtual ~GrpcCall() = default;
  grpc::GenericServerContext context;
  grpc::GenericServerAsyncReaderWriter stream{&context};
};

// Runs at the end of an operation, on a thread of the completion queue. Its address is the tag.
using Completion = absl::AnyInvocable<void(bool ok)>;

// A call that exists when its headers arrive, before a byte of a message is requested. Its messages
// are read and written from any thread, one of each at a time. The results arrive on the threads of
// the completion queue, possibly concurrently. OnDone comes last, once, when the call is finished
// and no operation is pending, and deletes the call.
class GenericCall {
 public:
  GenericCall(const GenericCall&) = delete;
  GenericCall& operator=(const GenericCall&) = delete;

  // Called after construction.
  virtual void Begin() = 0;

  // The caller received the response or disconnected. Called after Begin().
  void OnEnded();

 protected:
  explicit GenericCall(std::unique_ptr<GrpcCall> call);
  virtual ~GenericCall() = default;

  grpc::GenericServerContext& context() const { return call_->context; }

  // Call before finishing the call.
  void AddTrailers(const Call& call) const;

  // `message` must stay valid until OnReadDone, OnWriteDone or OnDone.
  void StartRead(grpc::ByteBuffer* message);
  void StartWrite(const grpc::ByteBuffer* message);
  // Call one of these two once, while no write is pending.
  void StartWriteAndFinish(const grpc::ByteBuffer* message, const grpc::Status& status);
  void StartFinish(const grpc::Status& status);

  // OnDone does not run between Ref() and Unref().
  void Ref() { ++pending_; }
  void Unref();

  virtual void OnReadDone(bool /*ok*/) {}
  virtual void OnWriteDone(bool /*ok*/) {}
  virtual void OnCancel() {}
  virtual void OnDone() = 0;

 private:
  const std::unique_ptr<GrpcCall> call_;
  // Operations that OnDone waits for: initially OnEnded() and the finish. Each started operation
  // adds one, so that the completing thread sees all writes of the starting thread.
  std::atomic<int> pending_{2};
  Completion read_, written_, finished_;
};

// Refers to the outputs, and keeps them and their memory reservation until gRPC has sent them.
grpc::ByteBuffer ToByteBuffer(ResponseMessage response);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_GENERIC_CALL_H_
