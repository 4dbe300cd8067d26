#include "server/wire/grpc/received_message.h"

#include <grpcpp/support/proto_buffer_reader.h>

#include "absl/strings/str_cat.h"

namespace rapt {
namespace {

// A slice costs 32 bytes in gRPC and 24 bytes here, which the memory budget does not include.
// Clients send frames of 16 KiB, and networks do not split them below some hundred bytes.
constexpr int64_t kMinAverageSliceBytes = 256;  // beyond this number of slices:
constexpr int64_t kFreeSlices = 1024;

}  // namespace

ReceivedMessage& ReceivedMessage::operator=(ReceivedMessage&& other) noexcept {
  buffer_.Swap(&other.buffer_);
  places_.swap(other.places_);
  return *this;
}

absl::Status ReceivedMessage::Take(grpc::ByteBuffer& buffer) {
  Clear();
  buffer_.Swap(&buffer);
  const int64_t most = kFreeSlices + static_cast<int64_t>(buffer_.Length()) / kMinAverageSliceBytes;
  int64_t slices = 0, end = 0;
  const void* data;
  int size;
  for (grpc::ProtoBufferReader reader(&buffer_); reader.Next(&data, &size);) {
    if (size == 0) continue;
    const int64_t begin = end;
    end += size;
    if (++slices <= most) places_.push_back({static_cast<const std::byte*>(data), begin, end});
  }
  if (slices <= most) return absl::OkStatus();
  Clear();
  return absl::InvalidArgumentError(absl::StrCat("the message's ", end, " bytes arrived in ",
                                                 slices, " slices; at most ", most,
                                                 " are allowed: send it in larger HTTP/2 frames"));
}

void ReceivedMessage::Clear() {
  places_ = {};
  buffer_.Clear();
}

}  // namespace rapt
