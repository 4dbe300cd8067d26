// The limit of streams that a connection tells its caller.
#ifndef RAPT_SERVER_WIRE_HTTP2_STREAM_LIMIT_H_
#define RAPT_SERVER_WIRE_HTTP2_STREAM_LIMIT_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>

#include "server/wire/http2/frame_reader.h"

namespace rapt {

// A refusal costs both sides up to a window of payload, and some callers repeat the call at once;
// below the limit their client keeps it. So a refusal lowers the limit, and a time without one
// raises it. Not thread-safe.
class StreamLimit {
 public:
  // SETTINGS with the new limit, to be sent between the frames of nghttp2. It is ours, because
  // nghttp2 would reset calls that were sent before it is read.
  using Frame = std::array<uint8_t, FrameHead::kBytes + 6>;

  explicit StreamLimit(int64_t most) : most_(most), told_(most) {}

  // A call is refused.
  void OnRefusal() { lowers_ = has_refused_ = true; }
  // Returns whether a call was refused since this was called last.
  bool TakeRefusals();

  // Lowers the limit to that of these streams, of which refused ones are not counted.
  std::optional<Frame> Lower(int64_t streams);
  // Doubles the limit, unless a call was refused since this was called last.
  std::optional<Frame> Raise();

  // Whether the frame is an acknowledgement that nghttp2 does not expect: of a Frame, not of its
  // own first SETTINGS.
  bool IsAcknowledgement(const FrameHead& frame);

 private:
  std::optional<Frame> Tell(int64_t limit);

  const int64_t most_;
  int64_t told_;  // to the caller
  int64_t unacknowledged_ = 0;
  bool lowers_ = false;
  bool has_refused_ = false;
  bool is_settled_ = false;  // the caller has acknowledged nghttp2's SETTINGS
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_STREAM_LIMIT_H_
