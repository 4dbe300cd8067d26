#include "server/wire/grpc/grpc_stream.h"

#include <utility>

#include "server/wire/grpc/call_headers.h"
#include "server/wire/grpc/received_message.h"
#include "server/wire/grpc/status.h"

namespace rapt {

CallHeaders GrpcStream::Headers(Instant now) const { return HeadersOf(context(), now); }

void GrpcStream::StartRead(int64_t) { GenericCall::StartRead(&incoming_); }

absl::StatusOr<IncomingMessage> GrpcStream::TakeMessage() {
  auto message = std::make_shared<ReceivedMessage>();
  if (absl::Status status = message->Take(incoming_); !status.ok()) return status;
  const MessageBytes bytes = message->bytes();
  return IncomingMessage{bytes, std::move(message)};
}

void GrpcStream::StartWrite(ResponseMessage message) {
  ToByteBuffer(std::move(message)).Swap(&outgoing_);
  GenericCall::StartWrite(&outgoing_);
}

void GrpcStream::StartWriteAndFinish(ResponseMessage message, const Call& call) {
  ToByteBuffer(std::move(message)).Swap(&outgoing_);
  AddTrailers(call);
  GenericCall::StartWriteAndFinish(&outgoing_, grpc::Status::OK);
}

void GrpcStream::StartFinish(const absl::Status& status, const Call& call) {
  AddTrailers(call);
  GenericCall::StartFinish(ToGrpcStatus(status));
}

void GrpcStream::OnWriteDone(bool ok) {
  outgoing_.Clear();  // its outputs are free once gRPC has also released them
  call_->OnWriteDone(ok);
}

void GrpcStream::OnDone() {
  call_->OnDone();
  delete this;
}

}  // namespace rapt
