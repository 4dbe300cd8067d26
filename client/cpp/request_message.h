// A serialized request that refers to the caller's tensors.
#ifndef RAPT_CLIENT_CPP_REQUEST_MESSAGE_H_
#define RAPT_CLIENT_CPP_REQUEST_MESSAGE_H_

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/types/span.h"

namespace rapt::client {

// Thread-compatible.
class RequestMessage {
 public:
  // Serialized bytes, which include payloads too small to be sent by reference, followed by a
  // payload, which may be empty.
  struct Piece {
    std::string bytes;
    absl::Span<const std::byte> payload;
  };

  void Append(absl::string_view bytes);
  // REQUIRES: the payload outlives the message.
  void AppendPayload(absl::Span<const std::byte> payload);
  // REQUIRES: the payloads of `message` outlive this one.
  void Append(const RequestMessage& message);
  void Prepend(absl::string_view bytes);

  int64_t size() const { return size_; }
  // In order.
  const std::vector<Piece>& pieces() const { return pieces_; }

 private:
  std::vector<Piece> pieces_ = {{}};
  int64_t size_ = 0;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_REQUEST_MESSAGE_H_
