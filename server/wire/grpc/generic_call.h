// What all calls that carry tensors over gRPC have in common, however many messages they have.
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

// A call as gRPC has it, created before the call arrives.
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

  // Right after construction.
  virtual void Begin() = 0;

  // The caller has the answer, or is gone. After Begin().
  void OnEnded();

 protected:
  explicit GenericCall(std::unique_ptr<GrpcCall> call);
  virtual ~GenericCall() = default;

  grpc::GenericServerContext& context() const { return call_->context; }

  // Before the call is finished.
  void AddTrailers(const Call& call) const;

  // `message` stays until OnReadDone, OnWriteDone or OnDone.
  void StartRead(grpc::ByteBuffer* message);
  void StartWrite(const grpc::ByteBuffer* message);
  // One of these two, once, when nothing is being written.
  void StartWriteAndFinish(const grpc::ByteBuffer* message, const grpc::Status& status);
  void StartFinish(const grpc::Status& status);

  // Between these, OnDone does not run, whatever ends meanwhile.
  void Hold() { ++pending_; }
  void LetGo();

  virtual void OnReadDone(bool /*ok*/) {}
  virtual void OnWriteDone(bool /*ok*/) {}
  virtual void OnCancel() {}
  virtual void OnDone() = 0;

 private:
  const std::unique_ptr<GrpcCall> call_;
  // Operations that OnDone waits for: at first OnEnded() and the finish; each operation begun
  // counts on top, so that the thread that learns of its end sees what the one that began it has
  // written.
  std::atomic<int> pending_{2};
  Completion read_, written_, finished_;
};

// Refers to the outputs, and keeps them and their memory reservation until gRPC has sent them.
grpc::ByteBuffer ToByteBuffer(AnswerMessage answer);

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_GENERIC_CALL_H_
