// Why the server rejected a valid call. The reason is attached to the status that the caller gets,
// for metrics.
#ifndef RAPT_SERVER_REJECTION_H_
#define RAPT_SERVER_REJECTION_H_

#include <cstdint>
#include <new>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace rapt {

enum class Rejection : uint8_t {
  kNone,
  kTooLarge,     // exceeds the memory budget or the message size limit
  kQueueFull,    // the queue for memory is full
  kQueueTime,    // waited too long for memory
  kOpenCalls,    // the server has too many open calls
  kCallerCalls,  // the caller has too many open calls
  kCallerShare,  // others waited for memory of which the caller holds more than its share
  kSlowSender,   // the caller sent the message too slowly
  kSlowReader,   // the caller read the response too slowly
  kDraining,     // the server is shutting down
  kOutOfMemory,  // an allocation within the budget failed
};
inline constexpr int kRejections = 11;

// Returns the metric label, such as "queue_full".
absl::string_view NameOf(Rejection rejection);

// Returns a status of this code that carries `why`.
absl::Status Reject(Rejection why, absl::StatusCode code, absl::string_view message);

// Returns kNone for a status not made by Reject().
Rejection RejectionOf(const absl::Status& status);

// Returns the rejection of a call that the system has no memory for: "no memory for `what`".
absl::Status OutOfMemory(absl::string_view what);

// Returns f(), an absl::StatusOr, or OutOfMemory(what) if it throws std::bad_alloc.
template <typename F>
auto UnlessOutOfMemory(absl::string_view what, const F& f) -> decltype(f()) {
  try {
    return f();
  } catch (const std::bad_alloc&) {
    return OutOfMemory(what);
  }
}

}  // namespace rapt

#endif  // RAPT_SERVER_REJECTION_H_
