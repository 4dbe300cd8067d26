#include "client/cpp/request_message.h"

namespace rapt::client {
namespace {

// A separate slice costs about as much as copying this many bytes.
constexpr size_t kCopiedBytes = 4096;

}  // namespace

void RequestMessage::Append(absl::string_view bytes) {
  if (!pieces_.back().payload.empty()) pieces_.emplace_back();
  pieces_.back().bytes.append(bytes.data(), bytes.size());
  size_ += static_cast<int64_t>(bytes.size());
}

void RequestMessage::AppendPayload(absl::Span<const std::byte> payload) {
  if (payload.size() <= kCopiedBytes) {
    return Append({reinterpret_cast<const char*>(payload.data()), payload.size()});
  }
  if (!pieces_.back().payload.empty()) pieces_.emplace_back();
  pieces_.back().payload = payload;
  size_ += static_cast<int64_t>(payload.size());
}

void RequestMessage::Append(const RequestMessage& message) {
  for (const Piece& piece : message.pieces()) {
    Append(piece.bytes);
    AppendPayload(piece.payload);
  }
}

void RequestMessage::Prepend(absl::string_view bytes) {
  pieces_.front().bytes.insert(0, bytes.data(), bytes.size());
  size_ += static_cast<int64_t>(bytes.size());
}

}  // namespace rapt::client
