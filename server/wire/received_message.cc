#include "server/wire/received_message.h"

namespace rapt {

absl::Status ReceivedMessage::Take(grpc::ByteBuffer& buffer) {
  Clear();
  buffer_.Swap(&buffer);
  const grpc::Status status = buffer_.Dump(&slices_);
  if (!status.ok()) return absl::InvalidArgumentError("the message can't be read");
  places_ = PlacesOf(slices_);
  return absl::OkStatus();
}

void ReceivedMessage::Clear() {
  places_ = {};
  slices_ = {};
  buffer_.Clear();
}

}  // namespace rapt
