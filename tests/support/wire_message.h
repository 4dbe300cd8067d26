// Serialized messages in slices, as received.
#ifndef RAPT_TESTS_SUPPORT_WIRE_MESSAGE_H_
#define RAPT_TESTS_SUPPORT_WIRE_MESSAGE_H_

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "server/protocols/message_parts.h"

namespace rapt::test {

// A serialized message in slices of `slice_bytes`; 0: one slice.
class WireMessage {
 public:
  explicit WireMessage(std::string bytes, int64_t slice_bytes = 0) : bytes_(std::move(bytes)) {
    const auto size = static_cast<int64_t>(bytes_.size());
    const int64_t step = slice_bytes > 0 ? slice_bytes : std::max<int64_t>(size, 1);
    for (int64_t begin = 0; begin < size; begin += step) {
      slices_.push_back({data() + begin, begin, std::min(begin + step, size)});
    }
  }
  WireMessage(const WireMessage&) = delete;
  WireMessage& operator=(const WireMessage&) = delete;

  const std::byte* data() const { return reinterpret_cast<const std::byte*>(bytes_.data()); }
  bool Contains(const std::byte* byte) const {
    return byte >= data() && byte < data() + bytes_.size();
  }
  MessageBytes bytes() const { return {{slices_, 0}, static_cast<int64_t>(bytes_.size())}; }

 private:
  const std::string bytes_;
  std::vector<ByteSlice> slices_;
};

// Returns the bytes of an input.
inline std::string Gather(const InputBytes& input) {
  std::string bytes(static_cast<size_t>(input.size), '\0');
  input.Copy(0, input.size, reinterpret_cast<std::byte*>(bytes.data()));
  return bytes;
}

// Returns the serialized response.
inline std::string Gather(ResponseMessage response) {
  std::string bytes;
  for (const ResponseMessage::Piece& piece : response.TakePieces()) {
    bytes += piece.bytes;
    bytes.append(reinterpret_cast<const char*>(piece.payload.bytes.data()),
                 piece.payload.bytes.size());
  }
  return bytes;
}

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_WIRE_MESSAGE_H_
