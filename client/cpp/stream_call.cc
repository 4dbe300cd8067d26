#include "client/cpp/stream_call.h"

#include <utility>

#include "base/status_macros.h"
#include "client/cpp/byte_buffer.h"
#include "client/cpp/codec.h"

namespace rapt::client {
namespace {

constexpr char kAttendStream[] = "/rapt.v1.AttentionService/AttendStream";

// The operation that a completion belongs to.
enum Event : intptr_t { kStarted = 1, kWritten, kReadDone, kFinished };

// gRPC returns tags as they are.
void* TagOf(Event event) {
  return reinterpret_cast<void*>(event);  // NOLINT(performance-no-int-to-ptr)
}

// Refers to the payloads, which `bytes` owns.
grpc::ByteBuffer MakeOwningBuffer(const RequestMessage& message,
                                  const std::shared_ptr<std::string>& bytes) {
  using Owner = std::shared_ptr<std::string>;
  return ToByteBuffer(message, [&](absl::Span<const std::byte> payload) {
    return grpc::Slice(
        const_cast<std::byte*>(payload.data()), payload.size(),
        [](void* owner) { delete static_cast<Owner*>(owner); }, new Owner(bytes));
  });
}

}  // namespace

StreamCall::StreamCall(const Connection& connection, grpc::ClientContext& context,
                       const ChunkedCall& chunked, const StreamOptions& options,
                       BorrowedPayloads& payloads, StreamResult& result)
    : context_(context),
      chunked_(chunked),
      options_(options),
      payloads_(payloads),
      result_(result),
      call_(grpc::GenericStub(connection.channel).PrepareCall(&context, kAttendStream, &queue_)) {
  progress_.bytes = chunked.bytes();
}

grpc::Status StreamCall::Run(absl::Status& own_error) {
  call_->StartCall(TagOf(kStarted));
  grpc::Status status;
  void* tag;
  bool ok;
  while (queue_.Next(&tag, &ok)) {
    switch (static_cast<Event>(reinterpret_cast<intptr_t>(tag))) {
      case kStarted:
        OnStarted(ok);
        break;
      case kWritten:
        OnWritten(ok);
        break;
      case kReadDone:
        OnRead(ok);
        break;
      case kFinished:
        queue_.Shutdown();
        continue;
    }
    if (!is_read_ || is_writing_) continue;
    call_->Finish(&status, TagOf(kFinished));
    is_read_ = false;  // once
  }
  own_error = std::move(own_error_);
  return status;
}

void StreamCall::OnStarted(bool ok) {
  if (!ok) {
    is_closed_ = is_read_ = true;
    return;
  }
  Read();
  sent_ = payloads_.MakeBuffer(chunked_.Header());
  is_writing_ = true;
  call_->Write(sent_, TagOf(kWritten));
}

void StreamCall::OnWritten(bool ok) {
  is_writing_ = false;
  sent_.Clear();
  if (!ok) is_closed_ = true;  // the status says why
  if (is_closed_) return;
  if (next_chunk_ > 0) {
    progress_.sent_bytes += chunked_.BytesOf(chunked_.chunks()[next_chunk_ - 1]);
    if (options_.progress) options_.progress(progress_);
  }
  WriteNext();
}

void StreamCall::WriteNext() {
  if (next_chunk_ == chunked_.chunks().size()) {
    is_closed_ = is_writing_ = true;
    return call_->WritesDone(TagOf(kWritten));
  }
  absl::StatusOr<grpc::ByteBuffer> chunk = NextChunk();
  if (!chunk.ok()) return Abort(chunk.status());
  sent_ = *std::move(chunk);
  is_writing_ = true;
  call_->Write(sent_, TagOf(kWritten));
}

absl::StatusOr<grpc::ByteBuffer> StreamCall::NextChunk() {
  const StreamChunk& chunk = chunked_.chunks()[next_chunk_++];
  if (!chunked_.NeedsRead(chunk)) return payloads_.MakeBuffer(chunked_.Chunk(chunk));
  std::shared_ptr<std::string> bytes;
  RAPT_ASSIGN_OR_RETURN(const RequestMessage message, chunked_.ReadChunk(chunk, bytes));
  return MakeOwningBuffer(message, bytes);
}

void StreamCall::Read() { call_->Read(&received_, TagOf(kReadDone)); }

void StreamCall::OnRead(bool ok) {
  if (!ok) {
    is_read_ = true;
    return;
  }
  if (const absl::Status status = TakeResponse(); !status.ok()) Abort(status);
  Read();  // until the end, which follows TryCancel() immediately
}

absl::Status StreamCall::TakeResponse() {
  if (!own_error_.ok()) return absl::OkStatus();
  return DecodeBytes(received_, [this](const SlicedBytes& bytes, int64_t size) {
    return result_.Take(bytes, size);
  });
}

void StreamCall::Abort(const absl::Status& why) {
  own_error_.Update(why);
  is_closed_ = true;
  context_.TryCancel();
}

}  // namespace rapt::client
