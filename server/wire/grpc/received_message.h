#ifndef RAPT_SERVER_WIRE_GRPC_RECEIVED_MESSAGE_H_
#define RAPT_SERVER_WIRE_GRPC_RECEIVED_MESSAGE_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/protocols/message_parts.h"

namespace rapt {

// A received message in gRPC's slices.
class ReceivedMessage {
 public:
  ReceivedMessage() = default;
  ReceivedMessage(ReceivedMessage&& other) noexcept { *this = std::move(other); }
  ReceivedMessage& operator=(ReceivedMessage&& other) noexcept;

  // Moves the slices out of `buffer`. InvalidArgument, leaving `buffer` unchanged, if the sender
  // split the message into so many frames that their bookkeeping exceeds the content.
  absl::Status Take(grpc::ByteBuffer& buffer);
  void Clear();

  int64_t size() const { return places_.empty() ? 0 : places_.back().end; }
  // Valid until Clear() or destruction.
  MessageBytes bytes() const { return {{places_, 0}, size()}; }

 private:
  // Never copied: the bytes of a short slice are inside the buffer object.
  grpc::ByteBuffer buffer_;
  std::vector<ByteSlice> places_;  // the non-empty slices of buffer_
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_RECEIVED_MESSAGE_H_
