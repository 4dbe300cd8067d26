#include "server/wire/receive_quota.h"

namespace rapt {
namespace {

// gRPC's own share of memory beside messages: connections, headers, what is on its way to a socket.
constexpr int64_t kGrpcOwnBytes = int64_t{64} << 20;

// Calls by which the limit grows: few changes, each of 4 MiB.
constexpr int64_t kStep = 64;

// For methods without tensors. Each call has one until its answer is out, which a caller that does
// not read can delay; more calls at once are told RESOURCE_EXHAUSTED.
constexpr int kMaxSynchronousThreads = 256;

}  // namespace

ReceiveQuota::ReceiveQuota(int64_t message_bytes) : message_bytes_(message_bytes), quota_("rapt") {
  quota_.SetMaxThreads(kMaxSynchronousThreads);
  quota_.Resize(static_cast<size_t>(message_bytes_ + kGrpcOwnBytes));
}

void ReceiveQuota::Follow(const OpenCalls& open_calls) {
  // Again where another thread has set an older count meanwhile.
  for (;;) {
    const int64_t steps = open_calls.places() / kStep + 1;
    const int64_t set = steps_;
    // One step too many is kept, lest a single call that comes and goes changes it each time.
    if (steps == set || steps == set - 1) return;
    steps_ = steps;
    quota_.Resize(
        static_cast<size_t>(message_bytes_ + kGrpcOwnBytes + steps * kStep * kStreamWindowBytes));
  }
}

}  // namespace rapt
