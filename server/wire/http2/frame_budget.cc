#include "server/wire/http2/frame_budget.h"

#include <nghttp2/nghttp2.h>

#include <algorithm>
#include <chrono>

namespace rapt {
namespace {

constexpr int64_t kBytesPerToken = 1024;

}  // namespace

void FrameBudget::Earn(int64_t tokens) { tokens_ = std::min(tokens_ + tokens, kCapacity); }

void FrameBudget::EarnByPayload(int64_t bytes) {
  payload_ += bytes;
  Earn(payload_ / kBytesPerToken);
  payload_ %= kBytesPerToken;
}

bool FrameBudget::Spend(int64_t tokens) {
  tokens_ = std::max<int64_t>(tokens_ - tokens, -1);
  return tokens_ >= 0;
}

void FrameBudget::Refill(Instant now) {
  using std::chrono::milliseconds;
  const int64_t ms = std::chrono::duration_cast<milliseconds>(now - refilled_).count();
  const int64_t tokens = ms * kPerSecond / 1000;
  if (tokens == 0) return;
  refilled_ = now;
  Earn(tokens);
}

bool FrameBudget::OnBytes(absl::Span<const uint8_t> bytes, Instant now) {
  Refill(now);
  for (bool is_within = true;;) {
    const size_t skipped = std::min(bytes.size(), static_cast<size_t>(skip_));
    skip_ -= static_cast<int64_t>(skipped);
    bytes.remove_prefix(skipped);
    if (bytes.empty()) return is_within;
    const size_t taken = std::min(bytes.size(), head_.size() - head_bytes_);
    std::copy_n(bytes.begin(), taken, head_.begin() + static_cast<ptrdiff_t>(head_bytes_));
    head_bytes_ += taken;
    bytes.remove_prefix(taken);
    if (head_bytes_ < head_.size()) return is_within;
    head_bytes_ = 0;
    is_within = OnFrame() && is_within;
  }
}

bool FrameBudget::OnFrame() {
  const int64_t length = head_[0] << 16 | head_[1] << 8 | head_[2];
  const uint8_t type = head_[3], flags = head_[4];
  skip_ = length;
  switch (type) {
    case NGHTTP2_DATA:
      EarnByPayload(length);
      return length >= kTinyData || (flags & NGHTTP2_FLAG_END_STREAM) != 0 || Spend(1);
    case NGHTTP2_HEADERS:
      header_block_ = length;
      continuations_ = 0;
      return header_block_ <= kMaxHeaderBlock;
    case NGHTTP2_CONTINUATION:
      header_block_ += length;
      return header_block_ <= kMaxHeaderBlock && ++continuations_ <= kMaxContinuations && Spend(1);
    default:
      return length <= kMaxControlFrame && Spend(1);
  }
}

}  // namespace rapt
