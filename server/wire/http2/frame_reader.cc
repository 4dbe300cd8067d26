#include "server/wire/http2/frame_reader.h"

#include <algorithm>

namespace rapt {
namespace {

FrameHead Parse(const std::array<uint8_t, FrameHead::kBytes>& head) {
  return {.length = head[0] << 16 | head[1] << 8 | head[2],
          .type = head[3],
          .flags = head[4],
          .stream =
              (head[5] & 0x7Fu) << 24 | uint32_t{head[6]} << 16 | uint32_t{head[7]} << 8 | head[8]};
}

}  // namespace

FrameReader::Pieces FrameReader::Read(absl::Span<const uint8_t> bytes,
                                      absl::FunctionRef<bool(const FrameHead&)> keeps) {
  Pieces pieces;
  size_t begin = 0;  // of the piece
  const auto end_piece = [&](size_t end, size_t next) {
    if (end > begin) pieces.push_back(bytes.subspan(begin, end - begin));
    begin = next;
  };
  for (size_t at = 0;;) {
    const size_t payload = std::min(bytes.size() - at, static_cast<size_t>(payload_left_));
    payload_left_ -= static_cast<int64_t>(payload);
    at += payload;
    if (drops_ && payload > 0) begin = at;
    if (at == bytes.size()) break;
    const size_t head_begin = at;
    const bool is_split = head_bytes_ > 0;
    const size_t taken = std::min(bytes.size() - at, head_.size() - head_bytes_);
    std::copy_n(bytes.begin() + static_cast<ptrdiff_t>(at), taken,
                head_.begin() + static_cast<ptrdiff_t>(head_bytes_));
    head_bytes_ += taken;
    at += taken;
    if (head_bytes_ < head_.size()) {
      end_piece(head_begin, at);
      break;
    }
    head_bytes_ = 0;
    const FrameHead head = Parse(head_);
    payload_left_ = head.length;
    drops_ = !keeps(head);
    if (drops_) {
      end_piece(head_begin, at);
    } else if (is_split) {
      split_head_ = head_;
      pieces.emplace_back(split_head_);
      begin = at;
    }
  }
  end_piece(bytes.size(), bytes.size());
  return pieces;
}

}  // namespace rapt
