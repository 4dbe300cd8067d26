#ifndef RAPT_SERVER_WIRE_RECEIVED_MESSAGE_H_
#define RAPT_SERVER_WIRE_RECEIVED_MESSAGE_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstdint>
#include <vector>

#include "absl/status/status.h"
#include "server/wire/message_parts.h"

namespace rapt {

// The slices of a message that gRPC received, kept alive.
class ReceivedMessage {
 public:
  // Takes them over from `buffer`, which is empty afterwards.
  absl::Status Take(grpc::ByteBuffer& buffer);
  void Clear();

  int64_t size() const { return places_.empty() ? 0 : places_.back().end; }
  // Valid until Clear() or destruction.
  MessageBytes bytes() const { return {{places_, 0}, size()}; }

 private:
  // Lets go of the slices after slices_: releasing a last reference to a slice may make gRPC take
  // memory back from others, which crashes (1.51) unless it is a ByteBuffer that releases it.
  grpc::ByteBuffer buffer_;
  std::vector<grpc::Slice> slices_;
  std::vector<ByteSlice> places_;  // of those that are not empty
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_RECEIVED_MESSAGE_H_
