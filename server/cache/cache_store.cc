#include "server/cache/cache_store.h"

#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <iterator>
#include <limits>

#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/checked_math.h"

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

absl::Status Invalid(absl::string_view text) { return absl::InvalidArgumentError(text); }

absl::Status ValidateShape(const LayerShape& shape) {
  const auto check = [](absl::string_view name, int64_t value) {
    if (value >= 1) return absl::OkStatus();
    return Invalid(absl::StrCat("shapes.", name, " is ", value, "; it must be at least 1"));
  };
  absl::Status status = check("layers", shape.layers);
  status.Update(check("kv_heads", shape.token.kv_heads));
  status.Update(check("head_size", shape.token.head_size));
  status.Update(check("value_head_size", shape.token.value_head_size));
  if (!status.ok()) return status;
  const auto sizes = CheckedAdd(shape.token.head_size, shape.token.value_head_size);
  const int64_t factors[] = {kPageTokens, shape.token.kv_heads, sizes.value_or(0),
                             SizeOf(shape.token.dtype)};
  if (!sizes || !CheckedProduct(factors)) {
    return Invalid("shapes: the bytes of 64 tokens overflow 64 bits");
  }
  return absl::OkStatus();
}

absl::Status Prefixed(const absl::Status& status, absl::string_view prefix) {
  const std::string text = absl::StrCat(prefix, std::string(status.message()));
  const Reason reason = ReasonOf(status);
  return reason == Reason::kNone ? absl::Status(status.code(), text)
                                 : Fail(reason, status.code(), text);
}

}  // namespace

// A caller's caches and memory.
struct CacheStore::Owner {
  explicit Owner(std::string name) : name(std::move(name)) {}

  // Adds bytes unless they exceed the limit; 0: no limit.
  bool TryCharge(int64_t more, int64_t limit) {
    int64_t now = bytes.load();
    while (limit <= 0 || more <= limit - now) {
      if (bytes.compare_exchange_weak(now, now + more)) return true;
    }
    return false;
  }

  const std::string name;
  std::atomic<int64_t> bytes{0};  // of its caches' pages; a page counts in each that reaches it
  // Guarded by the store's mutex.
  std::map<uint64_t, std::shared_ptr<Cache>> caches;  // in the order of their making
  std::map<std::string, std::shared_ptr<Cache>> named;
};

struct CacheStore::Cache {
  explicit Cache(std::shared_ptr<Owner> owner) : owner(std::move(owner)) {}
  ~Cache() { owner->bytes -= charged; }

  int64_t bytes() const {
    int64_t sum = 0;
    for (const PageList& layer : layers) sum += layer.bytes();
    return sum;
  }
  // Charges the owner for what the pages take now.
  void Settle() {
    const int64_t now = bytes();
    owner->bytes += now - charged;
    charged = now;
  }
  // Whether a call for `other` may be answered with this cache of the same name.
  bool WasMadeAs(const Cache& other) const {
    return shapes == other.shapes && first_position == other.first_position &&
           forked_from == other.forked_from && forked_length == other.forked_length;
  }

  // Constant once inserted.
  const std::shared_ptr<Owner> owner;
  std::string id;
  std::string name;
  uint64_t number = 0;
  std::vector<LayerShape> shapes;
  int64_t first_position = 0;
  int64_t reserve_tokens = 0;
  std::chrono::nanoseconds lease{0};
  std::string forked_from;
  int64_t forked_length = 0;

  Instant expires;         // guarded by the store's mutex
  bool is_linked = false;  // guarded by the store's mutex

  Mutex mutex;  // guards what follows; of several caches, locked in the order of their addresses
  std::vector<PageList> layers;
  uint64_t generation = 1;
  int64_t charged = 0;
  std::optional<int64_t> truncated_to;  // by the last Truncate(), while nothing was appended since
};

// Holds the mutexes of several caches.
class CacheStore::Locks {
 public:
  explicit Locks(std::vector<std::shared_ptr<Cache>> caches) ABSL_NO_THREAD_SAFETY_ANALYSIS
      : caches_(std::move(caches)) {
    std::sort(caches_.begin(), caches_.end());
    caches_.erase(std::unique(caches_.begin(), caches_.end()), caches_.end());
    for (const auto& cache : caches_) cache->mutex.Lock();
  }
  ~Locks() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (const auto& cache : caches_) cache->mutex.Unlock();
  }
  Locks(const Locks&) = delete;
  Locks& operator=(const Locks&) = delete;

  absl::Span<const std::shared_ptr<Cache>> caches() const { return caches_; }

 private:
  std::vector<std::shared_ptr<Cache>> caches_;
};

CacheStore::CacheStore(Options options, Arena& arena, const Clock& clock)
    : options_(std::move(options)),
      id_prefix_(absl::StrCat(options_.instance, ":", RandomHex(4), ":")),
      arena_(arena),
      clock_(clock) {
  RAPT_CHECK(options_.instance.size() <= kMaxInstanceBytes, "the instance's name fits into an id");
}

CacheStore::~CacheStore() {
  MutexLock lock(mutex_);
  // A cache and its owner refer to each other while the cache is linked.
  for (const auto& [name, owner] : owners_) {
    owner->named.clear();
    owner->caches.clear();
  }
}

std::string CacheStore::NewId() { return absl::StrCat(id_prefix_, RandomHex(16)); }

int64_t CacheStore::caches() const {
  MutexLock lock(mutex_);
  return static_cast<int64_t>(caches_.size());
}

std::shared_ptr<CacheStore::Owner> CacheStore::OwnerOf(const std::string& name) {
  if (owners_.size() > most_owners_) {
    // Copies are made under the lock or from a cache, so one that only the map holds stays unused.
    absl::erase_if(owners_, [](const auto& entry) { return entry.second.use_count() == 1; });
    most_owners_ = std::max(kFewOwners, 2 * owners_.size());
  }
  std::shared_ptr<Owner>& owner = owners_[name];
  if (owner == nullptr) owner = std::make_shared<Owner>(name);
  return owner;
}

absl::Status CacheStore::ValidateName(absl::string_view name) const {
  if (name.size() <= kMaxNameBytes) return absl::OkStatus();
  return Invalid(
      absl::StrCat("name has ", name.size(), " bytes; at most ", kMaxNameBytes, " are allowed"));
}

absl::StatusOr<std::chrono::nanoseconds> CacheStore::LeaseOf(
    std::chrono::nanoseconds wanted, std::chrono::nanoseconds otherwise) const {
  if (wanted.count() < 0) {
    return Invalid(absl::StrCat("lease_ms is ", Milliseconds(wanted), "; it must be at least 0"));
  }
  return std::min(wanted.count() == 0 ? otherwise : wanted, options_.max_lease);
}

absl::Status CacheStore::Validate(const CacheSpec& spec) const {
  if (absl::Status status = ValidateName(spec.name); !status.ok()) return status;
  if (spec.shapes.empty()) return Invalid("shapes is empty; a cache has at least one layer");
  int64_t layers = 0;
  for (const LayerShape& shape : spec.shapes) {
    if (absl::Status status = ValidateShape(shape); !status.ok()) return status;
    layers += std::min(shape.layers, kMaxLayers + 1);
    if (layers > kMaxLayers) {
      return Invalid(absl::StrCat("shapes have more than ", kMaxLayers, " layers"));
    }
  }
  if (spec.first_position < 0 || spec.first_position > std::numeric_limits<int64_t>::max() / 2) {
    return Invalid(
        absl::StrCat("first_position is ", spec.first_position, "; it must be in [0, 2^62)"));
  }
  return absl::OkStatus();
}

absl::Status CacheStore::ReservePart(Cache& cache, int64_t layer, int64_t count) const {
  PageList& list = cache.layers[static_cast<size_t>(layer)];
  // More tokens than bytes can't fit; Reserve() says so.
  const int64_t bytes = count > arena_.capacity_bytes() ? 0 : list.MissingBytes(count);
  const int64_t limit = options_.max_bytes_per_caller;
  if (!cache.owner->TryCharge(bytes, limit)) {
    return Fail(Reason::kQuota, absl::StatusCode::kResourceExhausted,
                absl::StrCat("needs ", bytes, " bytes of pages, ",
                             std::max<int64_t>(0, limit - cache.owner->bytes),
                             " are left of the caller's quota of ", limit));
  }
  const absl::Status status = list.Reserve(count);
  if (!status.ok()) {
    cache.owner->bytes -= bytes;
    return Fail(Reason::kPages, status.code(), status.message());
  }
  cache.charged += bytes;
  return absl::OkStatus();
}

absl::Status CacheStore::ReserveTokens(Cache& cache, int64_t tokens) {
  if (tokens < 0) {
    return Invalid(absl::StrCat("reserve_tokens is ", tokens, "; it must be at least 0"));
  }
  for (size_t n = 0; n < cache.layers.size(); ++n) {
    const int64_t more = std::max<int64_t>(0, tokens - cache.layers[n].length());
    absl::Status status = ReservePart(cache, static_cast<int64_t>(n), more);
    if (!status.ok()) return status;
  }
  return absl::OkStatus();
}

std::shared_ptr<CacheStore::Cache> CacheStore::NewCache(const std::string& owner) {
  MutexLock lock(mutex_);
  return std::make_shared<Cache>(OwnerOf(owner));
}

absl::StatusOr<std::optional<CacheInfo>> CacheStore::FindNamed(const std::shared_ptr<Owner>& owner,
                                                               const Cache& wanted) {
  if (wanted.name.empty()) return std::nullopt;
  Handle handle;
  {
    MutexLock lock(mutex_);
    const auto found = owner->named.find(wanted.name);
    if (found == owner->named.end()) return std::nullopt;
    if (found->second->expires <= clock_.Now()) return std::nullopt;
    handle = {found->second, found->second->expires};
  }
  if (!handle.cache->WasMadeAs(wanted)) {
    return absl::AlreadyExistsError(
        absl::StrCat("name: the cache '", wanted.name,
                     "' exists with other shapes, type or first_position, or of another fork"));
  }
  return InfoOf(*handle.cache, handle.expires);
}

absl::StatusOr<CacheInfo> CacheStore::Insert(const std::shared_ptr<Cache>& cache) {
  std::vector<std::shared_ptr<Cache>> gone;  // destroyed without the lock
  const std::shared_ptr<Owner> owner = cache->owner;
  Instant expires;
  {
    MutexLock lock(mutex_);
    ExpireLocked(clock_.Now(), gone);
    const bool is_taken = !cache->name.empty() && owner->named.contains(cache->name);
    if (!is_taken) {
      if (static_cast<int64_t>(owner->caches.size()) >= options_.max_caches_per_caller) {
        return Fail(
            Reason::kQuota, absl::StatusCode::kResourceExhausted,
            absl::StrCat("the caller has ", owner->caches.size(), " caches, which is its quota"));
      }
      cache->number = next_number_++;
      cache->is_linked = true;
      expires = clock_.Now() + cache->lease;
      cache->expires = expires;
      caches_[cache->id] = cache;
      owner->caches[cache->number] = cache;
      if (!cache->name.empty()) owner->named[cache->name] = cache;
      leases_.insert({expires, cache.get()});
    }
  }
  if (cache->number != 0) return InfoOf(*cache, expires);
  // Another call was first with this name.
  absl::StatusOr<std::optional<CacheInfo>> other = FindNamed(owner, *cache);
  if (!other.ok()) return other.status();
  if (*other) return **std::move(other);
  return absl::AbortedError(absl::StrCat("name: the cache '", cache->name,
                                         "' was made and closed by another call meanwhile"));
}

absl::StatusOr<CacheInfo> CacheStore::Create(const std::string& owner, const CacheSpec& spec) {
  if (absl::Status status = Validate(spec); !status.ok()) return status;
  const auto lease = LeaseOf(spec.lease, options_.default_lease);
  if (!lease.ok()) return lease.status();
  std::shared_ptr<Cache> cache = NewCache(owner);
  cache->id = NewId();
  cache->name = spec.name;
  cache->shapes = spec.shapes;
  cache->first_position = spec.first_position;
  cache->reserve_tokens = spec.reserve_tokens;
  cache->lease = *lease;
  absl::StatusOr<std::optional<CacheInfo>> named = FindNamed(cache->owner, *cache);
  if (!named.ok()) return named.status();
  if (*named) return **std::move(named);
  for (const LayerShape& shape : spec.shapes) {
    for (int64_t n = 0; n < shape.layers; ++n) cache->layers.emplace_back(arena_, shape.token);
  }
  if (absl::Status status = ReserveTokens(*cache, spec.reserve_tokens); !status.ok()) {
    return status;
  }
  return Insert(cache);
}

absl::StatusOr<CacheInfo> CacheStore::Fork(const std::string& owner, const ForkSpec& spec) {
  if (absl::Status status = ValidateName(spec.name); !status.ok()) return status;
  const absl::StatusOr<Handle> parent = Find(owner, spec.cache, /*renews=*/false);
  if (!parent.ok()) return parent.status();
  Cache& from = *parent->cache;
  const auto lease = LeaseOf(spec.lease, from.lease);
  if (!lease.ok()) return lease.status();
  auto fork = std::make_shared<Cache>(from.owner);
  fork->id = NewId();
  fork->name = spec.name;
  fork->shapes = from.shapes;
  fork->first_position = from.first_position;
  fork->reserve_tokens = spec.reserve_tokens;
  fork->lease = *lease;
  fork->forked_from = from.id;
  {
    MutexLock lock(from.mutex);
    if (spec.generation != from.generation) {
      return Fail(
          Reason::kGeneration, absl::StatusCode::kAborted,
          absl::StrCat("generation is ", spec.generation, "; the cache has ", from.generation));
    }
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const PageList& layer : from.layers) least = std::min(least, layer.length());
    fork->forked_length = spec.length.value_or(least);
    if (fork->forked_length < 0 || fork->forked_length > least) {
      return absl::OutOfRangeError(absl::StrCat("length is ", fork->forked_length,
                                                "; the shortest layer has ", least, " tokens"));
    }
    for (const PageList& layer : from.layers) {
      fork->layers.push_back(layer.Fork(fork->forked_length));
    }
  }
  absl::StatusOr<std::optional<CacheInfo>> named = FindNamed(fork->owner, *fork);
  if (!named.ok()) return named.status();
  if (*named) return **std::move(named);
  const int64_t limit = options_.max_bytes_per_caller;
  const int64_t bytes = fork->bytes();
  if (!fork->owner->TryCharge(bytes, limit)) {
    return Fail(Reason::kQuota, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the fork reaches ", bytes, " bytes of pages, ",
                             std::max<int64_t>(0, limit - fork->owner->bytes),
                             " are left of the caller's quota of ", limit));
  }
  fork->charged = bytes;
  if (absl::Status status = ReserveTokens(*fork, spec.reserve_tokens); !status.ok()) return status;
  return Insert(fork);
}

absl::StatusOr<CacheInfo> CacheStore::Truncate(const std::string& owner, const std::string& id,
                                               int64_t length, uint64_t generation) {
  const absl::StatusOr<Handle> handle = Find(owner, id, /*renews=*/false);
  if (!handle.ok()) return handle.status();
  Cache& cache = *handle->cache;
  {
    MutexLock lock(cache.mutex);
    const bool is_repeated = cache.truncated_to == length && generation + 1 == cache.generation;
    if (!is_repeated) {
      if (generation != cache.generation) {
        return Fail(
            Reason::kGeneration, absl::StatusCode::kAborted,
            absl::StrCat("generation is ", generation, "; the cache has ", cache.generation));
      }
      for (size_t n = 0; n < cache.layers.size(); ++n) {
        if (length >= 0 && length <= cache.layers[n].length()) continue;
        return absl::OutOfRangeError(absl::StrCat("length is ", length, "; layer ", n, " has ",
                                                  cache.layers[n].length(), " tokens"));
      }
      for (PageList& layer : cache.layers) layer.Truncate(length);
      ++cache.generation;
      cache.truncated_to = length;
      cache.Settle();
    }
  }
  return InfoOf(cache, handle->expires);
}

CacheInfo CacheStore::InfoOf(Cache& cache, Instant expires) const {
  CacheInfo info;
  info.id = cache.id;
  info.name = cache.name;
  info.shapes = cache.shapes;
  info.first_position = cache.first_position;
  info.lease = cache.lease;
  info.expires_in = std::max(std::chrono::nanoseconds(0), expires - clock_.Now());
  info.reserve_tokens = cache.reserve_tokens;
  MutexLock lock(cache.mutex);
  for (const PageList& layer : cache.layers) info.lengths.push_back(layer.length());
  info.generation = cache.generation;
  info.bytes = cache.bytes();
  return info;
}

Reason CacheStore::WhyMissing(const std::string& owner, absl::string_view id) const {
  const auto tombstone = tombstones_.find(std::string(id));
  if (tombstone != tombstones_.end()) {
    return tombstone->second.owner == owner ? tombstone->second.reason : Reason::kUnknown;
  }
  // "instance:start:random"
  const size_t last = id.rfind(':');
  if (last == absl::string_view::npos || last == 0) return Reason::kUnknown;
  const size_t start = id.rfind(':', last - 1);
  if (start == absl::string_view::npos) return Reason::kUnknown;
  if (id.substr(0, start) != options_.instance) return Reason::kWrongInstance;
  return id.substr(0, last + 1) == id_prefix_ ? Reason::kUnknown : Reason::kRestarted;
}

absl::StatusOr<CacheStore::Handle> CacheStore::FindLocked(const std::string& owner,
                                                          const std::string& id, bool renews) {
  const auto found = caches_.find(id);
  if (found == caches_.end() || found->second->owner->name != owner) {
    const Reason reason = WhyMissing(owner, id);
    return Fail(reason, absl::StatusCode::kNotFound,
                absl::StrCat("cache: '", id.substr(0, 2 * kMaxInstanceBytes),
                             "' is not found: ", std::string(NameOf(reason))));
  }
  Cache& cache = *found->second;
  if (renews) {
    leases_.erase({cache.expires, &cache});
    cache.expires = clock_.Now() + cache.lease;
    leases_.insert({cache.expires, &cache});
  }
  return Handle{found->second, cache.expires};
}

absl::StatusOr<CacheStore::Handle> CacheStore::Find(const std::string& owner, const std::string& id,
                                                    bool renews) {
  std::vector<std::shared_ptr<Cache>> gone;  // destroyed without the lock
  MutexLock lock(mutex_);
  ExpireLocked(clock_.Now(), gone);
  return FindLocked(owner, id, renews);
}

void CacheStore::Unlink(const std::shared_ptr<Cache>& cache, Reason reason) {
  if (!cache->is_linked) return;
  cache->is_linked = false;
  Owner& owner = *cache->owner;
  leases_.erase({cache->expires, cache.get()});
  tombstones_[cache->id] = {owner.name, reason};
  tombstone_order_.push_back(cache->id);
  if (tombstone_order_.size() > kTombstones) {
    tombstones_.erase(tombstone_order_.front());
    tombstone_order_.pop_front();
  }
  if (!cache->name.empty()) owner.named.erase(cache->name);
  owner.caches.erase(cache->number);
  caches_.erase(cache->id);
}

void CacheStore::ExpireLocked(Instant now, std::vector<std::shared_ptr<Cache>>& gone) {
  while (!leases_.empty() && leases_.begin()->first <= now) {
    const std::shared_ptr<Cache> cache = caches_.at(leases_.begin()->second->id);
    Unlink(cache, Reason::kExpired);
    gone.push_back(cache);
  }
}

Instant CacheStore::Expire() {
  std::vector<std::shared_ptr<Cache>> gone;  // destroyed without the lock
  MutexLock lock(mutex_);
  ExpireLocked(clock_.Now(), gone);
  return leases_.empty() ? Instant::max() : leases_.begin()->first;
}

absl::StatusOr<CacheList> CacheStore::ForEach(const std::string& owner,
                                              absl::Span<const std::string> ids, Action action) {
  CacheList list;
  absl::Status first;
  for (const std::string& id : ids) {
    const absl::StatusOr<Handle> handle = Find(owner, id, action == Action::kRenew);
    if (!handle.ok()) {
      first.Update(handle.status());
      list.missing.push_back({id, ReasonOf(handle.status())});
      continue;
    }
    list.caches.push_back(InfoOf(*handle->cache, handle->expires));
    if (action != Action::kClose) continue;
    MutexLock lock(mutex_);
    Unlink(handle->cache, Reason::kClosed);
  }
  if (list.caches.empty() && !first.ok()) return first;
  return list;
}

absl::StatusOr<CacheList> CacheStore::Get(const std::string& owner,
                                          absl::Span<const std::string> ids) {
  return ForEach(owner, ids, Action::kGet);
}

absl::StatusOr<CacheList> CacheStore::Renew(const std::string& owner,
                                            absl::Span<const std::string> ids) {
  return ForEach(owner, ids, Action::kRenew);
}

absl::StatusOr<CacheList> CacheStore::Close(const std::string& owner,
                                            absl::Span<const std::string> ids) {
  return ForEach(owner, ids, Action::kClose);
}

absl::StatusOr<CacheList> CacheStore::List(const std::string& owner, int64_t page_size,
                                           absl::string_view page_token,
                                           absl::string_view name_prefix) {
  if (page_size < 0 || page_size > kMaxListed) {
    return Invalid(
        absl::StrCat("page_size is ", page_size, "; it must be in [0, ", kMaxListed, "]"));
  }
  if (page_size == 0) page_size = kMaxListed;
  uint64_t after = 0;
  if (!page_token.empty() && !absl::SimpleAtoi(page_token, &after)) {
    return Invalid("page_token is not one that List returned");
  }
  std::vector<Handle> handles;
  CacheList list;
  {
    std::vector<std::shared_ptr<Cache>> gone;
    MutexLock lock(mutex_);
    ExpireLocked(clock_.Now(), gone);
    const auto found = owners_.find(owner);
    if (found == owners_.end()) return list;
    const auto& caches = found->second->caches;
    for (auto next = caches.upper_bound(after); next != caches.end(); ++next) {
      if (!absl::StartsWith(next->second->name, name_prefix)) continue;
      if (static_cast<int64_t>(handles.size()) == page_size) {
        list.next_page_token = absl::StrCat(handles.back().cache->number);
        break;
      }
      handles.push_back({next->second, next->second->expires});
    }
  }
  for (const Handle& handle : handles) list.caches.push_back(InfoOf(*handle.cache, handle.expires));
  return list;
}

absl::Status CacheStore::CheckPart(const Cache& cache, const AppendPart& part,
                                   AppendResult& result) const {
  if (part.layer < 0 || part.layer >= static_cast<int64_t>(cache.layers.size())) {
    return Invalid(
        absl::StrCat("layer is ", part.layer, "; the cache has ", cache.layers.size(), " layers"));
  }
  if (part.generation != cache.generation) {
    return Fail(
        Reason::kGeneration, absl::StatusCode::kAborted,
        absl::StrCat("generation is ", part.generation, "; the cache has ", cache.generation));
  }
  const PageList& list = cache.layers[static_cast<size_t>(part.layer)];
  const int64_t length = list.length();
  result.length = length;
  if (!part.at && part.count > 0) return Invalid("at is absent; new tokens need it");
  const int64_t at = part.at.value_or(length);
  if (at < 0 || at > length) {
    return absl::OutOfRangeError(absl::StrCat("at is ", at, "; the layer has ", length, " tokens"));
  }
  if (at == length) return absl::OkStatus();
  if (part.count > length - at) {
    return Fail(Reason::kConflict, absl::StatusCode::kAborted,
                absl::StrCat("at is ", at, " and ", part.count, " tokens come; the layer has ",
                             length, " tokens, which is in the middle of them"));
  }
  if (!list.Holds(at, part.count, part.keys, part.values)) {
    return Fail(Reason::kConflict, absl::StatusCode::kAborted,
                absl::StrCat("the layer has other tokens from ", at, " to ", at + part.count));
  }
  result.applied_before = part.count > 0;
  return absl::OkStatus();
}

absl::StatusOr<std::vector<AppendResult>> CacheStore::Append(const std::string& owner,
                                                             absl::Span<const AppendPart> parts,
                                                             bool partial) {
  std::set<std::pair<absl::string_view, int64_t>> seen;
  for (size_t n = 0; n < parts.size(); ++n) {
    if (parts[n].count < 0) {
      return Invalid(
          absl::StrCat("parts[", n, "]: count is ", parts[n].count, "; it must be at least 0"));
    }
    if (!seen.insert({parts[n].cache, parts[n].layer}).second) {
      return Invalid(
          absl::StrCat("parts[", n, "]: layer ", parts[n].layer, " of the cache occurs twice"));
    }
  }
  std::vector<AppendResult> results(parts.size());
  std::vector<std::shared_ptr<Cache>> caches(parts.size());
  for (size_t n = 0; n < parts.size(); ++n) {
    absl::StatusOr<Handle> handle = Find(owner, parts[n].cache, /*renews=*/true);
    if (handle.ok()) {
      caches[n] = std::move(handle->cache);
    } else {
      results[n].status = handle.status();
    }
  }
  std::vector<std::shared_ptr<Cache>> found;
  std::copy_if(caches.begin(), caches.end(), std::back_inserter(found),
               [](const auto& cache) { return cache != nullptr; });
  const Locks locks(std::move(found));

  // The reserved pages that each part found; absent if it appends nothing.
  std::vector<std::optional<int64_t>> reserved_before(parts.size());
  absl::Status first;
  for (size_t n = 0; n < parts.size(); ++n) {
    AppendResult& result = results[n];
    if (result.status.ok()) result.status = CheckPart(*caches[n], parts[n], result);
    if (result.status.ok() && !result.applied_before && parts[n].count > 0) {
      const PageList& list = caches[n]->layers[static_cast<size_t>(parts[n].layer)];
      const int64_t before = list.reserved_pages();
      result.status = ReservePart(*caches[n], parts[n].layer, parts[n].count);
      if (result.status.ok()) reserved_before[n] = before;
    }
    if (!result.status.ok())
      first.Update(Prefixed(result.status, absl::StrCat("parts[", n, "]: ")));
  }
  const bool fails = !partial && !first.ok();
  for (size_t n = 0; n < parts.size(); ++n) {
    if (!results[n].status.ok()) continue;
    const AppendPart& part = parts[n];
    PageList& list = caches[n]->layers[static_cast<size_t>(part.layer)];
    if (fails) {
      if (reserved_before[n]) list.KeepReserved(*reserved_before[n]);
      continue;
    }
    const int64_t at = part.at.value_or(list.length());
    if (reserved_before[n]) {
      list.Append(part.count, part.keys, part.values);
      caches[n]->truncated_to.reset();
    }
    results[n].length = list.length();
    results[n].snapshot = list.Take(at + part.count);
  }
  for (const auto& cache : locks.caches()) cache->Settle();
  if (fails) return first;
  return results;
}

}  // namespace rapt::cache
