// The limit of gRPC's own memory and threads.
#ifndef RAPT_SERVER_WIRE_GRPC_RECEIVE_QUOTA_H_
#define RAPT_SERVER_WIRE_GRPC_RECEIVE_QUOTA_H_

#include <grpcpp/resource_quota.h>

#include <atomic>
#include <cstdint>

#include "base/mutex.h"
#include "server/calls/open_calls.h"
#include "server/wire/message_stream.h"

namespace rapt {

// A limit just above the admitted memory. gRPC reaches it if callers send more than they declared,
// or if many streams send undeclared large messages at once; it then closes idle connections and
// ends streams, including those of other callers. The limit grows with the number of open calls,
// because each may fill its window before it is admitted. Thread-safe.
class ReceiveQuota {
 public:
  // `message_bytes` is the limit of the admitted messages of all calls together.
  explicit ReceiveQuota(int64_t message_bytes);

  const grpc::ResourceQuota& quota() const { return quota_; }

  // Call this after the number of open calls changed.
  void Follow(const OpenCalls& open_calls);

 private:
  const int64_t message_bytes_;
  grpc::ResourceQuota quota_;
  Mutex resizing_;
  std::atomic<int64_t> steps_{0};  // written while resizing_ is held
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_GRPC_RECEIVE_QUOTA_H_
