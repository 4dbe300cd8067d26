#include "server/wire/http2/keepalive.h"

#include <chrono>
#include <utility>

namespace rapt {
namespace {

// The minimum interval of pings without calls and data, and the earlier ones allowed, as in gRPC.
constexpr std::chrono::minutes kLeastInterval{5};
constexpr int kStrikes = 2;
// Closes connections of callers that have vanished.
constexpr std::chrono::minutes kOurInterval{2};
constexpr std::chrono::seconds kTimeout{20};

}  // namespace

Keepalive::Keepalive(Instant now) : read_(now), pinged_by_caller_(now - kLeastInterval) {}

void Keepalive::OnResponse() {
  OnActivity();
  strikes_ = 0;
}

bool Keepalive::OnPing(Instant now, bool has_calls) {
  const bool is_early = now - std::exchange(pinged_by_caller_, now) < kLeastInterval;
  if (std::exchange(is_active_since_ping_, false) || has_calls || !is_early) return true;
  return ++strikes_ <= kStrikes;
}

Keepalive::Action Keepalive::OnTick(Instant now) {
  if (pinged_ && *pinged_ <= read_) pinged_.reset();
  if (pinged_) return now - *pinged_ >= kTimeout ? Action::kClose : Action::kNone;
  if (now - read_ < kOurInterval) return Action::kNone;
  pinged_ = now;
  return Action::kPing;
}

}  // namespace rapt
