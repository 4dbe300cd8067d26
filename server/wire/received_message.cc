#include "server/wire/received_message.h"

namespace rapt {

absl::Status ReceivedMessage::Take(grpc::ByteBuffer& buffer) {
  const grpc::Status status = buffer.Dump(&slices_);
  buffer.Clear();
  if (!status.ok()) return absl::InvalidArgumentError("the message can't be read");
  places_.reserve(slices_.size());
  int64_t position = 0;
  for (const grpc::Slice& slice : slices_) {
    const int64_t end = position + static_cast<int64_t>(slice.size());
    if (end == position) continue;
    places_.push_back({reinterpret_cast<const std::byte*>(slice.begin()), position, end});
    position = end;
  }
  return absl::OkStatus();
}

void ReceivedMessage::Clear() {
  places_ = {};
  slices_ = {};
}

}  // namespace rapt
