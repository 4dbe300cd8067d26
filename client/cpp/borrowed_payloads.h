// Tracks the caller's memory while gRPC reads it.
#ifndef RAPT_CLIENT_CPP_BORROWED_PAYLOADS_H_
#define RAPT_CLIENT_CPP_BORROWED_PAYLOADS_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "client/cpp/request_message.h"

namespace rapt::client {

// Passes the payloads of requests to gRPC by reference and tracks when gRPC has released them. That
// is usually when the response arrives. After a call that was cancelled while sending, a write to
// the socket may still read them. Thread-safe. REQUIRES: outlives the buffers it made.
class BorrowedPayloads {
 public:
  BorrowedPayloads() = default;
  ~BorrowedPayloads();
  BorrowedPayloads(const BorrowedPayloads&) = delete;
  BorrowedPayloads& operator=(const BorrowedPayloads&) = delete;

  // Returns a buffer that refers to the payloads and owns the other bytes.
  grpc::ByteBuffer MakeBuffer(const RequestMessage& message);

  // Blocks until gRPC has released all payloads.
  void WaitUntilReleased();

  // Returns true if all payloads are released. Otherwise `released` runs once they are, on a gRPC
  // thread and inside gRPC: it must neither run user code nor block.
  // REQUIRES: no further MakeBuffer().
  bool IsReleased(absl::AnyInvocable<void()> released);

 private:
  grpc::Slice MakeSlice(absl::Span<const std::byte> bytes);
  void ReleaseSlice();

  Mutex mutex_;
  CondVar all_released_;
  int borrowed_slices_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::AnyInvocable<void()> released_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_BORROWED_PAYLOADS_H_
