#include "server/wire/client_records.h"

#include <algorithm>

namespace rapt {
namespace {

constexpr uint8_t kHandshake = 22;
constexpr size_t kRecordHead = 5, kMessageHead = 4;

}  // namespace

bool ClientRecords::OnBytes(absl::Span<const uint8_t> bytes, Phase phase) {
  for (;;) {
    const size_t skipped = std::min(bytes.size(), skip_);
    skip_ -= skipped;
    bytes.remove_prefix(skipped);
    if (bytes.empty()) return true;
    head_[head_bytes_++] = bytes.front();
    bytes.remove_prefix(1);
    if (head_bytes_ == kRecordHead && !OnRecord(phase)) return false;
    if (head_bytes_ == kRecordHead + kMessageHead && !OnMessage()) return false;
  }
}

bool ClientRecords::OnRecord(Phase phase) {
  record_bytes_ = static_cast<size_t>(head_[3] << 8 | head_[4]);
  const bool is_handshake = head_[0] == kHandshake;
  if (is_handshake && phase == Phase::kOpen) return false;
  if (is_handshake && phase == Phase::kHello && message_left_ == 0) {
    return record_bytes_ >= kMessageHead;  // the header of a message follows
  }
  if (is_handshake) message_left_ -= std::min(message_left_, record_bytes_);
  skip_ = record_bytes_;
  head_bytes_ = 0;
  return true;
}

bool ClientRecords::OnMessage() {
  const size_t size = static_cast<size_t>(head_[6] << 16 | head_[7] << 8 | head_[8]);
  skip_ = record_bytes_ - kMessageHead;
  message_left_ = size - std::min(size, skip_);
  head_bytes_ = 0;
  return size <= kMaxMessageBytes;
}

}  // namespace rapt
