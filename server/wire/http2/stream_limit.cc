#include "server/wire/http2/stream_limit.h"

#include <nghttp2/nghttp2.h>

#include <algorithm>
#include <utility>

#include "base/check.h"

namespace rapt {

bool StreamLimit::TakeRefusals() { return std::exchange(lowers_, false); }

std::optional<StreamLimit::Frame> StreamLimit::Lower(int64_t streams) {
  return Tell(std::min(told_, streams));
}

std::optional<StreamLimit::Frame> StreamLimit::Raise() {
  if (std::exchange(has_refused_, false)) return std::nullopt;
  return Tell(std::min(2 * told_, most_));
}

// None of nghttp2's header blocks needs a CONTINUATION, so the frame may come after any other.
std::optional<StreamLimit::Frame> StreamLimit::Tell(int64_t limit) {
  if (std::exchange(told_, limit) == limit) return std::nullopt;
  Frame frame = {0, 0, 6, NGHTTP2_SETTINGS, 0, 0, 0, 0, 0};
  nghttp2_settings_entry entry = {NGHTTP2_SETTINGS_MAX_CONCURRENT_STREAMS,
                                  static_cast<uint32_t>(limit)};
  RAPT_CHECK(nghttp2_pack_settings_payload(frame.data() + FrameHead::kBytes, 6, &entry, 1) == 6,
             "no room");
  ++unacknowledged_;
  return frame;
}

bool StreamLimit::IsAcknowledgement(const FrameHead& frame) {
  if (frame.type != NGHTTP2_SETTINGS || (frame.flags & NGHTTP2_FLAG_ACK) == 0) return false;
  if (!std::exchange(is_settled_, true)) return false;
  if (unacknowledged_ == 0 || frame.length != 0 || frame.stream != 0) return false;
  --unacknowledged_;
  return true;
}

}  // namespace rapt
