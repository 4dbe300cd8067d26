#include "server/wire/grpc/receive_quota.h"

namespace rapt {
namespace {

// gRPC's memory other than messages: connections, headers, bytes being sent.
constexpr int64_t kGrpcOwnBytes = int64_t{64} << 20;

// The limit changes in steps of this number of calls, 4 MiB each, so that it changes rarely.
constexpr int64_t kStep = 64;

// Threads for methods without tensors. A call occupies one until its response is sent, which a slow
// reader can delay; excess calls get RESOURCE_EXHAUSTED.
constexpr int kMaxSynchronousThreads = 256;

int64_t StepsFor(const OpenCalls& open_calls) { return open_calls.places() / kStep + 1; }

}  // namespace

ReceiveQuota::ReceiveQuota(int64_t message_bytes) : message_bytes_(message_bytes), quota_("rapt") {
  quota_.SetMaxThreads(kMaxSynchronousThreads);
  quota_.Resize(static_cast<size_t>(message_bytes_ + kGrpcOwnBytes));
}

void ReceiveQuota::Follow(const OpenCalls& open_calls) {
  for (;;) {
    // Hysteresis of one step, so that a single call does not change the limit back and forth.
    const int64_t missing = StepsFor(open_calls) - steps_;
    if (missing == 0 || missing == -1) return;
    // Serialized, so that an older count is never set last. Checked again afterwards, because a
    // concurrent caller may have seen the older count.
    MutexLock lock(resizing_);
    steps_ = StepsFor(open_calls);
    quota_.Resize(
        static_cast<size_t>(message_bytes_ + kGrpcOwnBytes + steps_ * kStep * kStreamWindowBytes));
  }
}

}  // namespace rapt
