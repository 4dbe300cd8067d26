// Bounds the cost of a connection in addition to that of its calls.
#ifndef RAPT_SERVER_WIRE_HTTP2_FRAME_BUDGET_H_
#define RAPT_SERVER_WIRE_HTTP2_FRAME_BUDGET_H_

#include <array>
#include <cstddef>
#include <cstdint>

#include "absl/types/span.h"
#include "base/clock.h"

namespace rapt {

// A token bucket. Frames that carry nothing take tokens: pings, settings, window updates,
// priorities, resets, unknown frames, tiny DATA. Time, payload and responses refill it, so that a
// connection that does useful work never runs out of tokens. Parses the frame headers itself,
// because nghttp2 does not report all frames that it ignores. Not thread-safe.
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

  // Call with all bytes of the connection, beginning with the preface. Returns false if the budget
  // is exceeded.
  bool OnBytes(absl::Span<const uint8_t> bytes, Instant now);

  // Returns false if the budget is exceeded.
  bool Spend(int64_t tokens);
  void EarnByResponse() { Earn(kResponseEarns); }
  void EarnByPayload(int64_t bytes);

  // Returns the bytes of the current frame that have not arrived yet.
  int64_t payload_left() const { return skip_; }

 private:
  void Earn(int64_t tokens);
  void Refill(Instant now);
  bool OnFrame();

  int64_t tokens_ = kCapacity;
  Instant refilled_;
  int64_t payload_ = 0;  // bytes that have not earned yet

  int64_t skip_ = 24;  // bytes until the next head: the preface, then payloads
  std::array<uint8_t, 9> head_ = {};
  size_t head_bytes_ = 0;
  int64_t header_block_ = 0;  // bytes of HEADERS and CONTINUATION so far
  int continuations_ = 0;     // of the block
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_FRAME_BUDGET_H_
