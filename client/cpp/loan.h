// The caller's memory while gRPC reads it.
#ifndef RAPT_CLIENT_CPP_LOAN_H_
#define RAPT_CLIENT_CPP_LOAN_H_

#include <grpcpp/support/byte_buffer.h>
#include <grpcpp/support/slice.h>

#include <cstddef>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"
#include "base/mutex.h"
#include "client/cpp/request_message.h"

namespace rapt::client {

// Lends the payloads of requests to gRPC and knows when they are back: as a rule with the answer,
// but where a call was given up while it was sent, a write to the socket may still read them.
// Thread-safe. Outlives what it lent.
class Loan {
 public:
  Loan() = default;
  ~Loan();
  Loan(const Loan&) = delete;
  Loan& operator=(const Loan&) = delete;

  // The message, its payloads by reference.
  grpc::ByteBuffer Lend(const RequestMessage& message);

  // Blocks until everything is back.
  void WaitUntilReturned();

  // Whether everything is back. Otherwise `returned` runs once when it is, on a thread of gRPC's
  // and in the midst of its work: it must not run a caller's code, or wait for anything. Nothing is
  // lent any more.
  bool IsReturned(absl::AnyInvocable<void()> returned);

 private:
  grpc::Slice LendBytes(absl::Span<const std::byte> bytes);
  void Return();

  Mutex mutex_;
  CondVar all_returned_;
  int lent_slices_ ABSL_GUARDED_BY(mutex_) = 0;
  absl::AnyInvocable<void()> returned_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_LOAN_H_
