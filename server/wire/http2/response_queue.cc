#include "server/wire/http2/response_queue.h"

#include <algorithm>
#include <string>

namespace rapt {

void ResponseQueue::Append(ResponseMessage message) {
  const int64_t size = message.size();
  std::string prefix(5, '\0');
  for (size_t i = 1; i < prefix.size(); ++i) {
    prefix[i] = static_cast<char>(static_cast<uint64_t>(size) >> (8 * (prefix.size() - 1 - i)));
  }
  ResponseMessage::Pieces pieces = message.TakePieces();
  if (pieces.empty()) pieces.emplace_back();
  pieces[0].bytes.insert(0, prefix);
  bytes_ += size + static_cast<int64_t>(prefix.size());
  for (ResponseMessage::Piece& piece : pieces) {
    if (!piece.bytes.empty()) segments_.push_back({std::move(piece.bytes), {}});
    if (!piece.payload.bytes.empty()) segments_.push_back({{}, std::move(piece.payload)});
  }
}

void ResponseQueue::MoveTo(OutputQueue& out, int64_t size) {
  bytes_ -= size;
  for (auto left = static_cast<size_t>(size); left > 0;) {
    OutputSegment& segment = segments_[first_];
    const size_t part = std::min(left, segment.view().size() - offset_);
    out.Append(segment, offset_, part);
    left -= part;
    offset_ += part;
    if (offset_ < segment.view().size()) break;
    segment = {};
    ++first_;
    offset_ = 0;
  }
  if (bytes_ > 0) return;
  segments_.clear();
  first_ = 0;
}

}  // namespace rapt
