// How much memory, and how many threads, gRPC may take by itself.
#ifndef RAPT_SERVER_WIRE_GRPC_RECEIVE_QUOTA_H_
#define RAPT_SERVER_WIRE_GRPC_RECEIVE_QUOTA_H_

#include <grpcpp/resource_quota.h>

#include <atomic>
#include <cstdint>

#include "base/mutex.h"
#include "server/calls/open_calls.h"

namespace rapt {

// What a call that does not read yet may have sent all the same: its stream's flow-control window.
inline constexpr int kStreamWindowBytes = 64 * 1024;

// A limit just above what is admitted, so that gRPC meets it where callers send more than they
// declared, or where many streams send large messages at once that they had not declared: it then
// closes idle connections and ends streams, anybody's. It grows with the calls that have entered,
// for each may fill its window before it is admitted.
// Thread-safe.
class ReceiveQuota {
 public:
  // `message_bytes`: what all calls together may hold of messages, as they are admitted.
  explicit ReceiveQuota(int64_t message_bytes);

  const grpc::ResourceQuota& quota() const { return quota_; }

  // To be called when calls have come or gone.
  void Follow(const OpenCalls& open_calls);

 private:
  const int64_t message_bytes_;
  grpc::ResourceQuota quota_;
  Mutex resizing_;
  std::atomic<int64_t> steps_{0};  // changed with resizing_ held
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_RECEIVE_QUOTA_H_
