#include "server/protocols/message_parts.h"

#include <algorithm>
#include <utility>

namespace rapt {
namespace {

// A separate slice costs about as much as copying this number of bytes.
constexpr size_t kCopiedBytes = 4096;

}  // namespace

InputBytes MessageBytes::Part(int64_t begin, int64_t count) const {
  if (count == 0) return {};
  const auto slices = bytes.slices;
  const int64_t first_byte = bytes.offset + begin;
  const int64_t end_byte = first_byte + count;
  const auto first = std::partition_point(slices.begin(), slices.end(),
                                          [&](const ByteSlice& s) { return s.end <= first_byte; });
  if (end_byte <= first->end) return {first->data + (first_byte - first->begin), count};
  const auto end = std::partition_point(first, slices.end(),
                                        [&](const ByteSlice& s) { return s.begin < end_byte; });
  return {SlicedBytes{{&*first, static_cast<size_t>(end - first)}, first_byte}, count};
}

std::string MessageBytes::ToString() const {
  std::string text(static_cast<size_t>(size), '\0');
  bytes.Copy(0, size, reinterpret_cast<std::byte*>(text.data()));
  return text;
}

void ResponseMessage::Append(const OutputBuffer& payload) {
  if (payload.bytes.size() <= kCopiedBytes) {
    open_.append(reinterpret_cast<const char*>(payload.bytes.data()), payload.bytes.size());
    return;
  }
  pieces_.push_back({std::exchange(open_, {}), payload});
}

int64_t ResponseMessage::size() const {
  size_t size = open_.size();
  for (const Piece& piece : pieces_) size += piece.bytes.size() + piece.payload.bytes.size();
  return static_cast<int64_t>(size);
}

ResponseMessage::Pieces ResponseMessage::TakePieces() {
  if (!open_.empty()) pieces_.push_back({std::exchange(open_, {}), {}});
  return std::exchange(pieces_, {});
}

}  // namespace rapt
