#include "server/wire/grpc/receive_quota.h"

namespace rapt {
namespace {

// gRPC's own share of memory beside messages: connections, headers, what is on its way to a socket.
constexpr int64_t kGrpcOwnBytes = int64_t{64} << 20;

// Calls by which the limit grows: few changes, each of 4 MiB.
constexpr int64_t kStep = 64;

// For methods without tensors. Each call has one until its answer is out, which a caller that does
// not read can delay; more calls at once are told RESOURCE_EXHAUSTED.
constexpr int kMaxSynchronousThreads = 256;

int64_t StepsFor(const OpenCalls& open_calls) { return open_calls.places() / kStep + 1; }

}  // namespace

ReceiveQuota::ReceiveQuota(int64_t message_bytes) : message_bytes_(message_bytes), quota_("rapt") {
  quota_.SetMaxThreads(kMaxSynchronousThreads);
  quota_.Resize(static_cast<size_t>(message_bytes_ + kGrpcOwnBytes));
}

void ReceiveQuota::Follow(const OpenCalls& open_calls) {
  for (;;) {
    // One step too many is kept, lest a single call that comes and goes changes it each time.
    const int64_t missing = StepsFor(open_calls) - steps_;
    if (missing == 0 || missing == -1) return;
    // In one go, or an older count could be what gRPC hears last. Looked at again afterwards, for
    // who came meanwhile may have seen the older one.
    MutexLock lock(resizing_);
    steps_ = StepsFor(open_calls);
    quota_.Resize(
        static_cast<size_t>(message_bytes_ + kGrpcOwnBytes + steps_ * kStep * kStreamWindowBytes));
  }
}

}  // namespace rapt
