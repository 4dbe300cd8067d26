// The pings of a connection, in both directions, with the rules of gRPC.
#ifndef RAPT_SERVER_WIRE_HTTP2_KEEPALIVE_H_
#define RAPT_SERVER_WIRE_HTTP2_KEEPALIVE_H_

#include <cstdint>
#include <optional>

#include "base/clock.h"

namespace rapt {

// Not thread-safe.
class Keepalive {
 public:
  enum class Action : uint8_t { kNone, kPing, kClose };

  explicit Keepalive(Instant now);

  void OnRead(Instant now) { read_ = now; }
  // HEADERS or DATA have come, or a response was sent.
  void OnActivity() { is_active_since_ping_ = true; }
  void OnResponse();

  // The caller has sent a ping. Returns false if it pings too often without calls.
  bool OnPing(Instant now, bool has_calls);

  // Returns what to do about a caller that has been silent: kPing, or kClose after a ping that
  // nothing has followed. Call it every second or so.
  Action OnTick(Instant now);

 private:
  Instant read_;
  std::optional<Instant> pinged_;  // by us, and nothing came since
  Instant pinged_by_caller_;
  bool is_active_since_ping_ = true;  // of the caller
  int strikes_ = 0;                   // since the last response
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_KEEPALIVE_H_
