#include "server/wire/grpc/generic_call.h"

#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"

namespace rapt {
namespace {

// A slice that keeps the output, and its memory reservation, until gRPC has sent it.
grpc::Slice SliceOf(const OutputBuffer& payload) {
  auto* kept = new OutputBuffer(payload);
  return grpc::Slice(
      const_cast<std::byte*>(kept->bytes.data()), kept->bytes.size(),
      [](void* output) { delete static_cast<OutputBuffer*>(output); }, kept);
}

}  // namespace

GenericCall::GenericCall(std::unique_ptr<GrpcCall> call)
    : call_(std::move(call)),
      read_([this](bool ok) {
        OnReadDone(ok);
        Unref();
      }),
      written_([this](bool ok) {
        OnWriteDone(ok);
        Unref();
      }),
      finished_([this](bool) {
        Unref();  // releases Ref()
        Unref();
      }) {}

void GenericCall::OnEnded() {
  if (context().IsCancelled()) OnCancel();
  Unref();
}

void GenericCall::Unref() {
  if (--pending_ == 0) OnDone();
}

void GenericCall::AddTrailers(const Call& call) const {
  call.ForEachTrailer([this](const char* name, const std::string& value) {
    context().AddTrailingMetadata(name, value);
  });
}

void GenericCall::StartRead(grpc::ByteBuffer* message) {
  ++pending_;
  call_->stream.Read(message, &read_);
}

void GenericCall::StartWrite(const grpc::ByteBuffer* message) {
  ++pending_;
  call_->stream.Write(*message, &written_);
}

void GenericCall::StartWriteAndFinish(const grpc::ByteBuffer* message, const grpc::Status& status) {
  Ref();
  call_->stream.WriteAndFinish(*message, grpc::WriteOptions(), status, &finished_);
}

void GenericCall::StartFinish(const grpc::Status& status) {
  Ref();
  call_->stream.Finish(status, &finished_);
}

grpc::ByteBuffer ToByteBuffer(ResponseMessage response) {
  absl::InlinedVector<grpc::Slice, 4> slices;
  for (const ResponseMessage::Piece& piece : response.TakePieces()) {
    if (!piece.bytes.empty()) slices.emplace_back(piece.bytes);
    if (!piece.payload.bytes.empty()) slices.push_back(SliceOf(piece.payload));
  }
  return grpc::ByteBuffer(slices.data(), slices.size());
}

}  // namespace rapt
