#include "server/wire/output_queue.h"

#include <sys/uio.h>

#include <array>
#include <utility>

namespace rapt {
namespace {

// The limit of bytes that wait to be written, apart from one frame.
constexpr int64_t kMaxBytes = 1 << 20;
constexpr int64_t kMaxCopiedBytes = 64 * 1024;

// A part of at most this size is copied: a place in writev() costs about as much.
constexpr size_t kSmallBytes = 4096;
constexpr size_t kSegmentBytes = 16 * 1024;
constexpr size_t kMaxPlaces = 64;

}  // namespace

absl::string_view OutputSegment::view() const {
  if (payload.bytes.empty()) return bytes;
  return {reinterpret_cast<const char*>(payload.bytes.data()), payload.bytes.size()};
}

bool OutputQueue::HasRoom() const { return bytes_ < kMaxBytes && copied_bytes_ < kMaxCopiedBytes; }

void OutputQueue::Append(const void* bytes, size_t size) {
  if (size == 0) return;
  if (segments_.empty()) progressed_ = clock_.Now();
  if (segments_.empty() || !segments_.back().payload.bytes.empty() ||
      segments_.back().bytes.size() + size > kSegmentBytes) {
    segments_.emplace_back();
  }
  segments_.back().bytes.append(static_cast<const char*>(bytes), size);
  bytes_ += static_cast<int64_t>(size);
  copied_bytes_ += static_cast<int64_t>(size);
}

void OutputQueue::Append(OutputSegment segment) {
  const size_t size = segment.view().size();
  if (size <= kSmallBytes) return Append(segment.view().data(), size);
  if (segments_.empty()) progressed_ = clock_.Now();
  bytes_ += static_cast<int64_t>(size);
  copied_bytes_ += static_cast<int64_t>(segment.bytes.size());
  segments_.push_back(std::move(segment));
}

void OutputQueue::Append(const OutputSegment& segment, size_t offset, size_t size) {
  const OutputBuffer& payload = segment.payload;
  if (payload.bytes.empty()) return Append(segment.bytes.data() + offset, size);
  Append({{}, {payload.bytes.subspan(offset, size), payload.owner}});
}

OutputQueue::Written OutputQueue::Write(Socket& socket, int64_t& left) {
  while (!segments_.empty()) {
    if (left <= 0) return Written::kBlocked;
    std::array<iovec, kMaxPlaces> places;
    size_t count = 0, offset = offset_;
    for (auto it = segments_.begin(); it != segments_.end() && count < places.size(); ++it) {
      const absl::string_view rest = it->view().substr(std::exchange(offset, 0));
      places[count++] = {const_cast<char*>(rest.data()), rest.size()};
    }
    const ssize_t size = socket.Write({places.data(), count});
    if (size == Socket::kBlocked) return Written::kBlocked;
    if (size == Socket::kEnded) return Written::kFailed;
    left -= size;
    Drop(size);
  }
  return Written::kAll;
}

// Removes bytes that have been written, and releases the outputs among them.
void OutputQueue::Drop(int64_t bytes) {
  progressed_ = clock_.Now();
  bytes_ -= bytes;
  offset_ += static_cast<size_t>(bytes);
  while (!segments_.empty() && offset_ >= segments_.front().view().size()) {
    offset_ -= segments_.front().view().size();
    copied_bytes_ -= static_cast<int64_t>(segments_.front().bytes.size());
    segments_.pop_front();
  }
}

}  // namespace rapt
