// Messages as seen by the codecs: a received message in slices, a response in parts. Neither is
// copied.
#ifndef RAPT_SERVER_PROTOCOLS_MESSAGE_PARTS_H_
#define RAPT_SERVER_PROTOCOLS_MESSAGE_PARTS_H_

#include <cstdint>
#include <memory>
#include <string>
#include <utility>

#include "absl/container/inlined_vector.h"
#include "base/sliced_bytes.h"
#include "server/request.h"

namespace rapt {

// A complete serialized message. Does not own its bytes.
struct MessageBytes {
  SlicedBytes bytes;
  int64_t size = 0;

  // Returns the slices of bytes [begin, begin + count).
  InputBytes Part(int64_t begin, int64_t count) const;

  // Returns a copy of all bytes.
  std::string ToString() const;
};

// A serialized message that references outputs.
class ResponseMessage {
 public:
  // Serialized fields, and payloads too small to be sent by reference.
  struct Piece {
    std::string bytes;
    OutputBuffer payload;  // follows the bytes
  };
  using Pieces = absl::InlinedVector<Piece, 2>;  // a tensor and the fields after it

  void Append(const std::string& bytes) { open_ += bytes; }
  // Appends the payload, which the message owns until it is destroyed.
  void Append(const OutputBuffer& payload);

  int64_t size() const;

  // All bytes, in order.
  Pieces TakePieces();

  // Memory that was reserved for its encoding by the transport; null: none.
  void KeepEncodingMemory(std::shared_ptr<EncodingMemory> memory) {
    encoding_memory_ = std::move(memory);
  }
  std::shared_ptr<EncodingMemory> TakeEncodingMemory() { return std::move(encoding_memory_); }

 private:
  Pieces pieces_;
  std::string open_;
  std::shared_ptr<EncodingMemory> encoding_memory_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_PROTOCOLS_MESSAGE_PARTS_H_
