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

bool FrameBudget::OnFrame(const FrameHead& frame) {
  switch (frame.type) {
    case NGHTTP2_DATA:
      EarnByPayload(frame.length);
      return frame.length >= kTinyData || (frame.flags & NGHTTP2_FLAG_END_STREAM) != 0 || Spend(1);
    case NGHTTP2_HEADERS:
      header_block_ = frame.length;
      continuations_ = 0;
      return header_block_ <= kMaxHeaderBlock;
    case NGHTTP2_CONTINUATION:
      header_block_ += frame.length;
      return header_block_ <= kMaxHeaderBlock && ++continuations_ <= kMaxContinuations && Spend(1);
    default:
      return frame.length <= kMaxControlFrame && Spend(1);
  }
}

}  // namespace rapt
