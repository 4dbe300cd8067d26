#include "server/cache/cache_directory.h"

#include <sys/random.h>

#include <algorithm>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/status_macros.h"
#include "server/cache/limits.h"

namespace rapt::cache {
namespace {

// Caches that are gone, of which the reason is remembered.
constexpr size_t kTombstones = 4096;

std::string RandomHex(size_t bytes) {
  std::string random(bytes, '\0');
  RAPT_CHECK(getrandom(random.data(), bytes, 0) == static_cast<ssize_t>(bytes),
             "getrandom returns up to 256 bytes at once");
  return absl::BytesToHexString(random);
}

}  // namespace

void CacheDirectory::SetInstance(const std::string& instance) {
  RAPT_CHECK(instance.size() <= kMaxInstanceBytes, "the instance's name fits into an id");
  instance_ = instance;
  id_prefix_ = absl::StrCat(instance, ":", RandomHex(4), ":");
}

std::string CacheDirectory::NewId() const { return absl::StrCat(id_prefix_, RandomHex(16)); }

std::shared_ptr<Account> CacheDirectory::AccountOf(const std::string& owner) {
  MutexLock lock(mutex_);
  if (owners_.size() > most_owners_) {
    // Copies are made under the lock or from a cache, so one that only the map holds stays unused.
    absl::erase_if(owners_,
                   [](const auto& entry) { return entry.second.account.use_count() == 1; });
    most_owners_ = std::max(kFewOwners, 2 * owners_.size());
  }
  std::shared_ptr<Account>& account = owners_[owner].account;
  if (account == nullptr) account = std::make_shared<Account>(owner, limits_.bytes_per_caller);
  return account;
}

absl::Status CacheDirectory::CheckRoomLocked(const Owner& owner) const {
  const auto count = static_cast<int64_t>(owner.caches.size());
  if (count < limits_.caches_per_caller) return absl::OkStatus();
  return refusals_.Fail(Reason::kQuota, absl::StatusCode::kResourceExhausted,
                        absl::StrCat("the caller has ", count, " caches, which is its quota"));
}

absl::Status CacheDirectory::CheckRoom(const std::string& owner) {
  Gone gone;
  MutexLock lock(mutex_);
  ExpireLocked(gone);
  const auto found = owners_.find(owner);
  return found == owners_.end() ? absl::OkStatus() : CheckRoomLocked(found->second);
}

absl::StatusOr<std::optional<CacheDirectory::Handle>> CacheDirectory::Add(
    const std::shared_ptr<ResidentCache>& cache) {
  const std::string& name = cache->spec().name;
  Gone gone;
  MutexLock lock(mutex_);
  ExpireLocked(gone);
  Owner& owner = owners_.at(cache->owner());  // its account is in use
  if (!name.empty() && owner.named.contains(name)) return std::nullopt;
  RAPT_RETURN_IF_ERROR(CheckRoomLocked(owner));
  const Instant expires = clock_.Now() + cache->spec().lease;
  auto entry = std::make_unique<Entry>(Entry{cache, next_number_++, expires, expires});
  owner.caches[entry->number] = entry.get();
  if (!name.empty()) owner.named[name] = entry.get();
  leases_.insert({expires, entry.get()});
  entries_[cache->id()] = std::move(entry);
  return Handle{cache, expires};
}

std::optional<CacheDirectory::Handle> CacheDirectory::FindNamed(const std::string& owner,
                                                                const std::string& name) const {
  MutexLock lock(mutex_);
  const auto by = owners_.find(owner);
  if (by == owners_.end()) return std::nullopt;
  const auto found = by->second.named.find(name);
  if (found == by->second.named.end()) return std::nullopt;
  const Entry& entry = *found->second;
  if (entry.expires <= clock_.Now()) return std::nullopt;
  return Handle{entry.cache, entry.expires};
}

Reason CacheDirectory::WhyMissing(const std::string& owner, absl::string_view id) const {
  const auto tombstone = tombstones_.find(std::string(id));
  if (tombstone != tombstones_.end()) {
    return tombstone->second.owner == owner ? tombstone->second.reason : Reason::kUnknown;
  }
  // "instance:start:random"
  const size_t last = id.rfind(':');
  if (last == absl::string_view::npos || last == 0) return Reason::kUnknown;
  const size_t start = id.rfind(':', last - 1);
  if (start == absl::string_view::npos) return Reason::kUnknown;
  if (id.substr(0, start) != instance_) return Reason::kWrongInstance;
  return id.substr(0, last + 1) == id_prefix_ ? Reason::kUnknown : Reason::kRestarted;
}

absl::StatusOr<CacheDirectory::Handle> CacheDirectory::FindLocked(const std::string& owner,
                                                                  const std::string& id,
                                                                  bool renews) {
  if (id.empty()) {
    return absl::InvalidArgumentError("cache is empty; it must be the id of a cache");
  }
  const auto found = entries_.find(id);
  if (found == entries_.end() || found->second->cache->owner() != owner) {
    const Reason reason = WhyMissing(owner, id);
    return refusals_.Fail(reason, absl::StatusCode::kNotFound,
                          absl::StrCat("cache: '", id.substr(0, kMaxIdBytes),
                                       "' is not found: ", std::string(NameOf(reason))));
  }
  Entry& entry = *found->second;
  if (renews) entry.expires = clock_.Now() + entry.cache->spec().lease;
  ++finds_;
  return Handle{entry.cache, entry.expires};
}

std::vector<absl::StatusOr<CacheDirectory::Handle>> CacheDirectory::FindAll(
    const std::string& owner, absl::Span<const std::string> ids, bool renews) {
  std::vector<absl::StatusOr<Handle>> found;
  found.reserve(ids.size());
  Gone gone;
  MutexLock lock(mutex_);
  ExpireLocked(gone);
  for (const std::string& id : ids) found.push_back(FindLocked(owner, id, renews));
  return found;
}

absl::StatusOr<CacheDirectory::Handle> CacheDirectory::Find(const std::string& owner,
                                                            const std::string& id, bool renews) {
  return std::move(FindAll(owner, {&id, 1}, renews).front());
}

bool CacheDirectory::Has(const std::string& owner, const std::string& id) const {
  MutexLock lock(mutex_);
  const auto found = entries_.find(id);
  return found != entries_.end() && found->second->cache->owner() == owner &&
         found->second->expires > clock_.Now();
}

void CacheDirectory::Remove(Entry& entry, Reason reason) {
  const ResidentCache& cache = *entry.cache;
  Owner& owner = owners_.at(cache.owner());
  leases_.erase({entry.queued_expiry, &entry});
  tombstones_[cache.id()] = {cache.owner(), reason};
  tombstone_order_.push_back(cache.id());
  if (tombstone_order_.size() > kTombstones) {
    tombstones_.erase(tombstone_order_.front());
    tombstone_order_.pop_front();
  }
  if (!cache.spec().name.empty()) owner.named.erase(cache.spec().name);
  owner.caches.erase(entry.number);
  entries_.erase(entries_.find(cache.id()));
}

void CacheDirectory::Close(absl::Span<const Handle> handles) {
  MutexLock lock(mutex_);
  for (const Handle& handle : handles) {
    const auto found = entries_.find(handle.cache->id());
    if (found != entries_.end()) Remove(*found->second, Reason::kClosed);
  }
}

void CacheDirectory::ExpireLocked(Gone& gone) {
  const Instant now = clock_.Now();
  while (!leases_.empty() && leases_.begin()->first <= now) {
    Entry& first = *leases_.begin()->second;
    if (first.expires > now) {
      leases_.erase(leases_.begin());
      first.queued_expiry = first.expires;
      leases_.insert({first.expires, &first});
      continue;
    }
    gone.push_back(first.cache);
    Remove(first, Reason::kExpired);
    ++expired_;
  }
}

Instant CacheDirectory::Expire() {
  Gone gone;
  MutexLock lock(mutex_);
  ExpireLocked(gone);
  return leases_.empty() ? Instant::max() : leases_.begin()->first;
}

CacheDirectory::Page CacheDirectory::List(const std::string& owner, uint64_t after, int64_t size,
                                          absl::string_view name_prefix) {
  Page page;
  Gone gone;
  MutexLock lock(mutex_);
  ExpireLocked(gone);
  const auto found = owners_.find(owner);
  if (found == owners_.end()) return page;
  const auto& caches = found->second.caches;
  uint64_t last = 0;
  for (auto next = caches.upper_bound(after); next != caches.end(); ++next) {
    const Entry& entry = *next->second;
    if (!absl::StartsWith(entry.cache->spec().name, name_prefix)) continue;
    if (static_cast<int64_t>(page.caches.size()) == size) {
      page.next = last;
      break;
    }
    page.caches.push_back({entry.cache, entry.expires});
    last = entry.number;
  }
  return page;
}

int64_t CacheDirectory::size() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(entries_.size());
}

}  // namespace rapt::cache
