// Requests that wait for memory, and the order in which they get it.
#ifndef RAPT_SERVER_ADMISSION_FAIR_QUEUE_H_
#define RAPT_SERVER_ADMISSION_FAIR_QUEUE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <memory>

#include "absl/container/flat_hash_map.h"
#include "absl/functional/function_ref.h"
#include "base/clock.h"
#include "server/admission/caller_memory.h"

namespace rapt {

// A request in the queue.
struct WaitingRequest {
  virtual ~WaitingRequest() = default;

  std::shared_ptr<CallerBytes> caller;  // null: the server itself, which holds nothing
  int64_t bytes = 0;
  uint64_t priority = 0;  // Request::priority
  Instant since;
  bool yields = false;  // to all requests within their callers' fair shares
};

// The queue of one share of the memory budget.
//
// Fair share. The share is divided evenly among the callers that hold memory of it or wait for it.
// A request is within its caller's fair share if the caller holds nothing, or would not exceed the
// fair share with it. Such requests are served first; others only if none of these waits. So a
// caller that holds more gets no more while another one waits, and a caller that is alone can get
// everything. A request behind one of its caller that is not within the fair share waits with it.
// A request that yields waits with those that are not within it. A confined caller gets no more
// than the fair share would be with one caller more, even if nobody else waits.
//
// Order. Within these two groups, requests are served in order of arrival. Each level of priority
// counts as an arrival `level_delay` earlier. So a waiting request eventually precedes later ones
// of any priority.
//
// Head of the line. The first request that does not fit blocks those behind it, so that later small
// requests cannot starve large ones.
//
// Has no threads, no clock and no lock: not thread-safe. It does not reserve memory itself.
class FairQueue {
 public:
  using Entry = std::unique_ptr<WaitingRequest>;

  // `holders` counts the callers that hold memory of the share; outlives this.
  FairQueue(int64_t capacity_bytes, const std::atomic<int64_t>& holders,
            std::chrono::nanoseconds level_delay)
      : capacity_bytes_(capacity_bytes), holders_(holders), level_delay_(level_delay) {}

  void Add(Entry entry);

  // Returns whether a new request would be offered memory before all others.
  bool WouldBeFirst(const WaitingRequest& request) const;

  // Offers memory to the requests that `is_meant` selects, in order. `take` reserves it and takes
  // the entry, or returns false without changing it if the memory is not free, which ends the
  // offer.
  void Offer(absl::FunctionRef<bool(const WaitingRequest&)> is_meant,
             absl::FunctionRef<bool(Entry&)> take);

  // Passes each request to `take`, which takes the entry, or leaves it and returns false.
  void RemoveIf(absl::FunctionRef<bool(Entry&)> take);

  // Removes the last request of the caller with the most requests, in favor of a new one of a
  // caller that has `count`. Returns null if no caller has at least two more than that.
  Entry Displace(int64_t count);
  int64_t CountOf(const CallerBytes* caller) const;

  // Returns the earliest arrival of a request that is within its caller's fair share or yields, or
  // Instant::max().
  Instant OldestWithinShare() const;

  // Returns the bytes that each caller may hold while others wait.
  int64_t FairShare() const;

  bool empty() const { return entries_.empty(); }
  void ForEach(absl::FunctionRef<void(const WaitingRequest&)> visit) const {
    for (const auto& [rank, entry] : entries_) visit(*entry);
  }

 private:
  using Entries = std::multimap<Instant, Entry>;  // by rank

  bool OfferTo(absl::FunctionRef<bool(const WaitingRequest&)> is_meant,
               absl::FunctionRef<bool(Entry&)> take);
  void Forget(const CallerBytes* caller);
  int64_t Callers() const;
  // Returns whether the request exceeds what its caller is confined to.
  bool IsHeldBack(const WaitingRequest& request) const;

  const int64_t capacity_bytes_;
  const std::atomic<int64_t>& holders_;
  const std::chrono::nanoseconds level_delay_;
  Entries entries_;
  absl::flat_hash_map<const CallerBytes*, int64_t> waiting_;  // requests by caller
};

}  // namespace rapt

#endif  // RAPT_SERVER_ADMISSION_FAIR_QUEUE_H_
