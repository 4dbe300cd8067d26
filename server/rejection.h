// Why a call was turned away although nothing is wrong with its request, beside the status that its
// caller gets: for counting.
#ifndef RAPT_SERVER_REJECTION_H_
#define RAPT_SERVER_REJECTION_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace rapt {

enum class Rejection : uint8_t {
  kNone,
  kTooLarge,     // for the memory budget, or for the limit on messages
  kQueueFull,    // of those that wait for memory
  kQueueTime,    // waited too long
  kOpenCalls,    // of the server
  kCallerCalls,  // of one caller
  kSlowSender,   // the message came too slowly
  kSlowReader,   // the answer was read too slowly
  kDraining,     // the server takes no new requests
  kOutOfMemory,  // the system has less than the budget says
};
inline constexpr int kRejections = 10;

// "queue_full", as metrics label it.
absl::string_view NameOf(Rejection rejection);

// A status of that code that remembers why.
absl::Status Reject(Rejection why, absl::StatusCode code, absl::string_view message);

// kNone for every status that Reject() did not make.
Rejection RejectionOf(const absl::Status& status);

}  // namespace rapt

#endif  // RAPT_SERVER_REJECTION_H_
