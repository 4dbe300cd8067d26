// Bounds the cost of a connection in addition to that of its calls.
#ifndef RAPT_SERVER_WIRE_HTTP2_FRAME_BUDGET_H_
#define RAPT_SERVER_WIRE_HTTP2_FRAME_BUDGET_H_

#include <cstdint>

#include "base/clock.h"
#include "server/wire/http2/frame_reader.h"

namespace rapt {

// A token bucket. Frames that carry nothing take tokens: pings, settings, window updates,
// priorities, resets, unknown frames, tiny DATA. Time, payload and responses refill it, so that a
// connection that does useful work never runs out of tokens. Not thread-safe.
class FrameBudget {
 public:
  static constexpr int64_t kCapacity = 10000;
  static constexpr int64_t kPerSecond = 1000;
  static constexpr int64_t kProvokedResetCost = 5;  // of a reset by the server
  static constexpr int64_t kResponseEarns = 10;
  static constexpr int64_t kTinyData = 256;  // DATA of fewer bytes takes a token
  // A header block with at most 16 KiB of headers is never longer, even if it is padded.
  static constexpr int64_t kMaxHeaderBlock = 32 * 1024;
  // Per block. Beyond this, nghttp2 closes the connection without a GOAWAY.
  static constexpr int kMaxContinuations = 8;
  static constexpr int64_t kMaxControlFrame = 16 * 1024;

  explicit FrameBudget(Instant now) : refilled_(now) {}

  // Call for each frame that arrives: nghttp2 does not report all that it ignores. Returns false if
  // the budget is exceeded.
  bool OnFrame(const FrameHead& frame);
  void Refill(Instant now);

  // Returns false if the budget is exceeded.
  bool Spend(int64_t tokens);
  // A message that a stream has taken pays for the frame that ended it.
  void EarnByMessage() { Earn(1); }
  void EarnByResponse() { Earn(kResponseEarns); }
  void EarnByPayload(int64_t bytes);

 private:
  void Earn(int64_t tokens);

  int64_t tokens_ = kCapacity;
  Instant refilled_;
  int64_t payload_ = 0;       // bytes that have not earned yet
  int64_t header_block_ = 0;  // bytes of HEADERS and CONTINUATION so far
  int continuations_ = 0;     // of the block
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_FRAME_BUDGET_H_
