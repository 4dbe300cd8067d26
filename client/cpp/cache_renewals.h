// Renews the leases of caches in the background.
#ifndef RAPT_CLIENT_CPP_CACHE_RENEWALS_H_
#define RAPT_CLIENT_CPP_CACHE_RENEWALS_H_

#include <atomic>
#include <chrono>
#include <functional>
#include <set>
#include <stop_token>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"

namespace rapt::client {

// The lease of one cache. Thread-safe.
class CacheLease {
 public:
  using Clock = std::chrono::steady_clock;

  // `counted_from`: before the call that made the cache.
  CacheLease(std::string id, std::chrono::nanoseconds length, Clock::time_point counted_from)
      : id(std::move(id)), length(length), renewed_(counted_from) {}

  const std::string id;
  const std::chrono::nanoseconds length;

  // A call that renewed the lease began at `time`.
  void Renewed(Clock::time_point time) { renewed_ = time; }
  Clock::time_point renewed() const { return renewed_; }

 private:
  friend class CacheRenewals;
  std::atomic<Clock::time_point> renewed_;
  // Of CacheRenewals, guarded by its mutex: no renewal before this time.
  Clock::time_point not_before_ = Clock::time_point::min();
};

// One thread for the leases of a client, started by the first one. Renews a lease a third of its
// length after the last call that renewed it. Thread-safe.
class CacheRenewals {
 public:
  // Renews 1 to 1024 caches. Returns the ids of those that the server does not have.
  using Renew = std::function<absl::StatusOr<std::vector<std::string>>(
      const std::vector<std::string>& ids, std::chrono::nanoseconds timeout, std::stop_token stop)>;

  explicit CacheRenewals(Renew renew);
  // REQUIRES: all leases were removed.
  ~CacheRenewals();
  CacheRenewals(const CacheRenewals&) = delete;
  CacheRenewals& operator=(const CacheRenewals&) = delete;

  // REQUIRES: `lease` is removed before it is destroyed.
  void Add(CacheLease& lease);
  void Remove(CacheLease& lease);

 private:
  struct Batch {
    std::vector<std::string> ids;  // empty: stopped
    std::chrono::nanoseconds timeout;
  };

  void Run(const std::stop_token& stop);
  Batch WaitForDue();
  // Takes over what a renewal that began at `start` achieved.
  void Finish(const Batch& batch, CacheLease::Clock::time_point start,
              const absl::StatusOr<std::vector<std::string>>& missing);

  const Renew renew_;
  Mutex mutex_;
  CondVar changed_;
  std::set<CacheLease*> leases_ ABSL_GUARDED_BY(mutex_);
  bool is_stopped_ ABSL_GUARDED_BY(mutex_) = false;
  std::jthread thread_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_CACHE_RENEWALS_H_
