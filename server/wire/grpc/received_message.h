#ifndef RAPT_SERVER_WIRE_GRPC_RECEIVED_MESSAGE_H_
#define RAPT_SERVER_WIRE_GRPC_RECEIVED_MESSAGE_H_

#include <grpcpp/support/byte_buffer.h>

#include <cstdint>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "server/protocols/message_parts.h"

namespace rapt {

// A message that gRPC received, in the slices that it came in.
class ReceivedMessage {
 public:
  ReceivedMessage() = default;
  ReceivedMessage(ReceivedMessage&& other) noexcept { *this = std::move(other); }
  ReceivedMessage& operator=(ReceivedMessage&& other) noexcept;

  // Takes them over from `buffer`, which is empty afterwards. InvalidArgument, and nothing is
  // taken, where the sender cut the message into so many frames that they weigh more than the
  // bytes.
  absl::Status Take(grpc::ByteBuffer& buffer);
  void Clear();

  int64_t size() const { return places_.empty() ? 0 : places_.back().end; }
  // Valid until Clear() or destruction.
  MessageBytes bytes() const { return {{places_, 0}, size()}; }

 private:
  // Never copied: the bytes of a short slice lie in the buffer itself.
  grpc::ByteBuffer buffer_;
  std::vector<ByteSlice> places_;  // of the slices in buffer_ that are not empty
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_RECEIVED_MESSAGE_H_
