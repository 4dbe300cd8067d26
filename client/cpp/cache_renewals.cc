#include "client/cpp/cache_renewals.h"

#include <algorithm>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "base/check.h"

namespace rapt::client {
namespace {

using Clock = CacheLease::Clock;

constexpr size_t kMaxIds = 1024;  // of one call

}  // namespace

CacheRenewals::CacheRenewals(Renew renew) : renew_(std::move(renew)) {}

CacheRenewals::~CacheRenewals() {
  std::jthread thread;
  {
    MutexLock lock(mutex_);
    RAPT_CHECK(leases_.empty(), "caches must be destroyed before their client");
    is_stopped_ = true;
    changed_.SignalAll();
    thread.swap(thread_);
  }
  // Its destructor requests the stop and waits.
}

void CacheRenewals::Add(CacheLease& lease) {
  MutexLock lock(mutex_);
  leases_.insert(&lease);
  changed_.SignalAll();
  if (!thread_.joinable()) {
    thread_ = std::jthread([this](const std::stop_token& stop) { Run(stop); });
  }
}

void CacheRenewals::Remove(CacheLease& lease) {
  MutexLock lock(mutex_);
  leases_.erase(&lease);
}

void CacheRenewals::Run(const std::stop_token& stop) {
  for (;;) {
    const Batch batch = WaitForDue();
    if (batch.ids.empty()) return;
    const Clock::time_point start = Clock::now();
    Finish(batch, start, renew_(batch.ids, batch.timeout, stop));
  }
}

CacheRenewals::Batch CacheRenewals::WaitForDue() {
  MutexLock lock(mutex_);
  while (!is_stopped_) {
    const Clock::time_point now = Clock::now();
    Clock::time_point next = Clock::time_point::max();
    Batch batch{{}, std::chrono::nanoseconds::max()};
    for (const CacheLease* lease : leases_) {
      const Clock::time_point due =
          std::max(lease->renewed() + lease->length / 3, lease->not_before_);
      next = std::min(next, due);
      // Those that are due soon come along, so that many caches need few calls.
      if (due > now + lease->length / 12 || batch.ids.size() == kMaxIds) continue;
      batch.ids.push_back(lease->id);
      batch.timeout = std::min(batch.timeout, lease->length / 3);
    }
    if (next <= now) return batch;
    if (next == Clock::time_point::max()) {
      changed_.Wait(mutex_);
    } else {
      changed_.WaitFor(mutex_, next - now);
    }
  }
  return {};
}

void CacheRenewals::Finish(const Batch& batch, Clock::time_point start,
                           const absl::StatusOr<std::vector<std::string>>& missing) {
  const absl::flat_hash_set<std::string> asked(batch.ids.begin(), batch.ids.end());
  absl::flat_hash_set<std::string> gone;
  if (missing.ok()) gone.insert(missing->begin(), missing->end());
  MutexLock lock(mutex_);
  for (CacheLease* lease : leases_) {
    if (!asked.contains(lease->id)) continue;
    if (gone.contains(lease->id)) {
      lease->not_before_ = Clock::time_point::max();  // the next call tells its caller why
    } else if (missing.ok()) {
      lease->Renewed(start);
    } else {
      lease->not_before_ = Clock::now() + lease->length / 6;
    }
  }
}

}  // namespace rapt::client
