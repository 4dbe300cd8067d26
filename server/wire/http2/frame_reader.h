// Finds the frames in the bytes of a connection, before nghttp2 parses them.
#ifndef RAPT_SERVER_WIRE_HTTP2_FRAME_READER_H_
#define RAPT_SERVER_WIRE_HTTP2_FRAME_READER_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/container/inlined_vector.h"
#include "absl/functional/function_ref.h"
#include "absl/types/span.h"

namespace rapt {

struct FrameHead {
  static constexpr size_t kBytes = 9;

  int64_t length = 0;  // of the payload
  uint8_t type = 0;
  uint8_t flags = 0;
  uint32_t stream = 0;
};

// Not thread-safe.
class FrameReader {
 public:
  using Pieces = absl::InlinedVector<absl::Span<const uint8_t>, 2>;

  // Call with all bytes of the connection, beginning with the preface. Calls `keeps` for each head;
  // a frame for which it returns false is dropped. Returns the other bytes in their order, except
  // those of an incomplete head, which are held back until it is complete. The pieces refer to
  // `bytes` and to this object, and are valid until the next call.
  Pieces Read(absl::Span<const uint8_t> bytes, absl::FunctionRef<bool(const FrameHead&)> keeps);

  // Returns the bytes of the current frame that have not arrived yet.
  int64_t payload_left() const { return payload_left_; }

 private:
  int64_t payload_left_ = 24;  // the preface comes first
  bool drops_ = false;
  std::array<uint8_t, FrameHead::kBytes> head_ = {};
  size_t head_bytes_ = 0;
  std::array<uint8_t, FrameHead::kBytes> split_head_ = {};  // arrived in two reads
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_FRAME_READER_H_
