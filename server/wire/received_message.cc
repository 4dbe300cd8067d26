#include "server/wire/received_message.h"

namespace rapt {

absl::Status ReceivedMessage::Take(grpc::ByteBuffer& buffer) {
  const grpc::Status status = buffer.Dump(&slices_);
  buffer.Clear();
  if (!status.ok()) return absl::InvalidArgumentError("the message can't be read");
  places_ = PlacesOf(slices_);
  return absl::OkStatus();
}

void ReceivedMessage::Clear() {
  places_ = {};
  slices_ = {};
}

}  // namespace rapt
