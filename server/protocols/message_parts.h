// Messages as the codecs see them: received bytes in slices, an answer in pieces. Neither is
// copied.
#ifndef RAPT_SERVER_PROTOCOLS_MESSAGE_PARTS_H_
#define RAPT_SERVER_PROTOCOLS_MESSAGE_PARTS_H_

#include <cstdint>
#include <string>

#include "absl/container/inlined_vector.h"
#include "base/sliced_bytes.h"
#include "server/request.h"

namespace rapt {

// A whole serialized message; non-owning.
struct MessageBytes {
  SlicedBytes bytes;
  int64_t size = 0;

  // Where bytes [begin, begin + count) lie.
  InputBytes Part(int64_t begin, int64_t count) const;
};

// A serialized message that refers to outputs.
class AnswerMessage {
 public:
  // What is not a payload, and payloads too small to travel by reference.
  struct Piece {
    std::string bytes;
    OutputBuffer payload;  // comes after them
  };
  using Pieces = absl::InlinedVector<Piece, 2>;  // a tensor and what comes behind it

  void Append(const std::string& bytes) { open_ += bytes; }
  // Shares the payload until the message is destroyed.
  void Append(const OutputBuffer& payload);

  // Everything, in order.
  Pieces TakePieces();

 private:
  Pieces pieces_;
  std::string open_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_MESSAGE_PARTS_H_
