// Why a call on a cache failed, where the status code stands for several reasons.
#ifndef RAPT_SERVER_CACHE_REASON_H_
#define RAPT_SERVER_CACHE_REASON_H_

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace rapt::cache {

enum class Reason : uint8_t {
  kNone,
  // NOT_FOUND
  kUnknown,        // never was, is another caller's, was closed long ago, or is malformed
  kClosed,         // by its owner, of late
  kExpired,        // its lease ran out, of late
  kRestarted,      // made by this instance before it was started anew
  kWrongInstance,  // made by another instance
  // RESOURCE_EXHAUSTED
  kPages,  // too few free pages
  kQuota,  // the caller's quota of caches or bytes
  // FAILED_PRECONDITION
  kEvicted,  // a token that is needed was freed
  // ABORTED
  kConflict,    // the tokens there are others
  kGeneration,  // the cache was truncated meanwhile
  // UNAVAILABLE
  kDraining,  // the server is shutting down
};
inline constexpr int kReasons = 12;

// Returns the value of the trailer rapt-reason, such as "wrong_instance"; empty for kNone.
absl::string_view NameOf(Reason reason);

// Returns a status of this code that carries the reason.
absl::Status Fail(Reason reason, absl::StatusCode code, absl::string_view message);

// Returns kNone for a status not made by Fail().
Reason ReasonOf(const absl::Status& status);

// Counts failures by reason. Thread-safe.
class Refusals {
 public:
  // Counts a failure and returns its status.
  absl::Status Fail(Reason reason, absl::StatusCode code, absl::string_view message);
  int64_t count(Reason reason) const { return counts_[static_cast<size_t>(reason)]; }

 private:
  std::array<std::atomic<int64_t>, kReasons> counts_{};
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_REASON_H_
