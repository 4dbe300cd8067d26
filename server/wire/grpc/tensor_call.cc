#include "server/wire/grpc/tensor_call.h"

#include <utility>

#include "server/wire/grpc/call_headers.h"
#include "server/wire/grpc/status.h"

namespace rapt {

TensorCall::TensorCall(const CallEnvironment& environment, const UnaryMethod& method,
                       std::unique_ptr<GrpcCall> call)
    : GenericCall(std::move(call)),
      UnaryCall(environment, method.observe, method.traits),
      handler_(method.new_handler()) {}

void TensorCall::Begin() { OnHeaders(HeadersOf(context(), call().arrived())); }

void TensorCall::End(absl::Status status) { UnaryCall::End(std::move(status)); }

void TensorCall::StartReading() {
  Ref();  // the read and the call may end before StartRead() returns
  StartRead(&buffer_);
  OnReadingStarted();
  Unref();
}

void TensorCall::OnReadDone(bool ok) {
  if (!OnRead(ok)) return;
  if (absl::Status status = TakeMessage(); !status.ok()) return End(std::move(status));
  handler_->OnMessage(message_.bytes(), *this);
}

absl::Status TensorCall::TakeMessage() {
  absl::Status status = message_.Take(buffer_);
  return status.ok() ? OnMessageBytes(message_.size()) : status;
}

void TensorCall::Respond(ResponseMessage response) {
  ToByteBuffer(std::move(response)).Swap(&buffer_);
  AddTrailers(call());
  BeginResponse(static_cast<int64_t>(buffer_.Length()));
  StartWriteAndFinish(&buffer_, grpc::Status::OK);
}

void TensorCall::Finish(const absl::Status& status) {
  AddTrailers(call());
  StartFinish(ToGrpcStatus(status));
}

void TensorCall::OnDone() {
  OnClosed();
  delete this;
}

}  // namespace rapt
