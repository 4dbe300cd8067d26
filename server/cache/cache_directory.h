// The live caches of all callers: their ids, names and leases.
#ifndef RAPT_SERVER_CACHE_CACHE_DIRECTORY_H_
#define RAPT_SERVER_CACHE_CACHE_DIRECTORY_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "server/cache/reason.h"
#include "server/cache/resident_cache.h"

namespace rapt::cache {

// A cache is found by its owner alone, until it is removed or its lease has run out. The directory
// remembers why the last caches are gone. Thread-safe. `refusals` and `clock` outlive it.
class CacheDirectory {
 public:
  struct Limits {
    int64_t caches_per_caller = 0;
    int64_t bytes_per_caller = 0;  // 0: none
  };
  // A cache that was found, and when its lease runs out.
  struct Handle {
    std::shared_ptr<ResidentCache> cache;
    Instant expires;
  };

  CacheDirectory(const Limits& limits, Refusals& refusals, const Clock& clock)
      : limits_(limits), refusals_(refusals), clock_(clock) {}

  // Names the instance in the ids. REQUIRES: at most kMaxInstanceBytes; no other method has been
  // called.
  void SetInstance(const std::string& instance);
  // Returns an id that nobody can guess.
  std::string NewId() const;
  // Returns the account of a caller, which all of its caches share.
  std::shared_ptr<Account> AccountOf(const std::string& owner);

  // ResourceExhausted if the owner has as many caches as it may have.
  absl::Status CheckRoom(const std::string& owner);
  // Makes the cache visible. Returns nullopt if its owner has a live one of its name;
  // ResourceExhausted if the owner has too many.
  absl::StatusOr<std::optional<Handle>> Add(const std::shared_ptr<ResidentCache>& cache);
  // Returns NotFound with the reason. `renews` the lease.
  absl::StatusOr<Handle> Find(const std::string& owner, const std::string& id, bool renews);
  std::vector<absl::StatusOr<Handle>> FindAll(const std::string& owner,
                                              absl::Span<const std::string> ids, bool renews);
  // Returns nullopt if the owner has no live cache of that name.
  std::optional<Handle> FindNamed(const std::string& owner, const std::string& name) const;
  bool Has(const std::string& owner, const std::string& id) const;
  void Close(absl::Span<const Handle> handles);

  struct Page {
    std::vector<Handle> caches;
    uint64_t next = 0;  // `after` of the next page; 0: there is none
  };
  // Returns up to `size` of the owner's caches, in the order of their making.
  Page List(const std::string& owner, uint64_t after, int64_t size, absl::string_view name_prefix);

  // Removes the caches whose lease has run out. Returns when the next one will; max() without
  // caches.
  Instant Expire();

  int64_t size() const;
  int64_t expired() const { return expired_; }
  // Returns how many caches Find() and FindAll() have found so far.
  int64_t finds() const { return finds_; }

 private:
  struct Entry {
    std::shared_ptr<ResidentCache> cache;
    uint64_t number = 0;  // in the order of making
    Instant expires;
    Instant queued_expiry;  // its place in leases_, which may be earlier
  };
  struct Owner {
    std::shared_ptr<Account> account;
    std::map<uint64_t, Entry*> caches = {};
    std::map<std::string, Entry*> named = {};
  };
  struct Tombstone {
    std::string owner;
    Reason reason;
  };
  using Gone = std::vector<std::shared_ptr<ResidentCache>>;  // destroyed without the lock

  absl::Status CheckRoomLocked(const Owner& owner) const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Handle> FindLocked(const std::string& owner, const std::string& id, bool renews)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Reason WhyMissing(const std::string& owner, absl::string_view id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Remove(Entry& entry, Reason reason) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void ExpireLocked(Gone& gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  const Limits limits_;
  Refusals& refusals_;
  const Clock& clock_;
  std::string instance_;   // constant, as the next, once caches are made
  std::string id_prefix_;  // names the instance and this start of it
  std::atomic<int64_t> expired_{0};
  std::atomic<int64_t> finds_{0};

  mutable Mutex mutex_;
  absl::flat_hash_map<std::string, Owner> owners_ ABSL_GUARDED_BY(mutex_);
  static constexpr size_t kFewOwners = 64;
  size_t most_owners_ ABSL_GUARDED_BY(mutex_) = kFewOwners;  // before unused ones are removed
  absl::flat_hash_map<std::string, std::unique_ptr<Entry>> entries_ ABSL_GUARDED_BY(mutex_);
  std::set<std::pair<Instant, Entry*>> leases_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;
  // Of the last caches that are gone.
  absl::flat_hash_map<std::string, Tombstone> tombstones_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> tombstone_order_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_CACHE_DIRECTORY_H_
