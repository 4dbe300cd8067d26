#include "server/cache/cache_store.h"

#include <sys/random.h>

#include <algorithm>
#include <atomic>
#include <limits>

#include "absl/container/flat_hash_set.h"
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

absl::Status AtLeast(absl::string_view name, int64_t value, int64_t least) {
  if (value >= least) return absl::OkStatus();
  return Invalid(absl::StrCat(name, " is ", value, "; it must be at least ", least));
}

absl::Status ValidateShape(const LayerShape& shape) {
  absl::Status status = AtLeast("shapes.layers", shape.layers, 1);
  status.Update(AtLeast("shapes.kv_heads", shape.token.kv_heads, 1));
  status.Update(AtLeast("shapes.head_size", shape.token.head_size, 1));
  status.Update(AtLeast("shapes.value_head_size", shape.token.value_head_size, 1));
  status.Update(AtLeast("shapes.keep_first", shape.keep_first, 0));
  status.Update(AtLeast("shapes.keep_last", shape.keep_last, 0));
  if (!status.ok()) return status;
  const auto sizes = CheckedAdd(shape.token.head_size, shape.token.value_head_size);
  const int64_t factors[] = {kPageTokens, shape.token.kv_heads, sizes.value_or(0),
                             SizeOf(shape.token.dtype)};
  if (!sizes || !CheckedProduct(factors)) {
    return Invalid("shapes: the bytes of 64 tokens overflow 64 bits");
  }
  return absl::OkStatus();
}

absl::Status ValidateName(absl::string_view name) {
  if (name.size() <= CacheStore::kMaxNameBytes) return absl::OkStatus();
  return Invalid(absl::StrCat("name has ", name.size(), " bytes; at most ",
                              CacheStore::kMaxNameBytes, " are allowed"));
}

absl::Status Validate(const CacheSpec& spec) {
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
  return AtLeast("reserve_tokens", spec.reserve_tokens, 0);
}

absl::Status Prefixed(const absl::Status& status, absl::string_view prefix) {
  const std::string text = absl::StrCat(prefix, std::string(status.message()));
  const Reason reason = ReasonOf(status);
  return reason == Reason::kNone ? absl::Status(status.code(), text)
                                 : Fail(reason, status.code(), text);
}

absl::Status NameInUse(absl::string_view name) {
  return absl::AlreadyExistsError(absl::StrCat("name: the cache '", name, "' exists"));
}

// The tokens of a layer that rows from `row` on, a token index, cannot see.
TokenRange UnseenFrom(int64_t row, const LayerShape& shape, int64_t first_position) {
  if (shape.keep_last == 0) return {};
  const int64_t begin = std::max<int64_t>(0, shape.keep_first - first_position);
  return {begin, std::max(begin, row < shape.keep_last ? 0 : row - shape.keep_last + 1)};
}

// Whether a row at token `row`, in front of which the layer ends, sees a token that is evicted, or
// would be written to a page that is.
bool NeedsEvicted(int64_t row, const LayerShape& shape, const PageList& list) {
  int64_t begin = row < shape.keep_last ? 0 : row - shape.keep_last + 1;
  if (row % kPageTokens != 0) begin = std::min(begin, row - 1);
  return list.evicted().Overlaps({begin, row});
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
  // Of its caches' pages, where a page counts in each that reaches it, and of the tables of tokens
  // that were imported as evicted.
  std::atomic<int64_t> bytes{0};
  // Guarded by the store's mutex.
  std::map<uint64_t, std::shared_ptr<Cache>> caches;  // in the order of their making
  std::map<std::string, std::shared_ptr<Cache>> named;
};

struct CacheStore::Cache {
  // Of the record of a cache and of one layer, without pages.
  static constexpr int64_t kRecordBytes = 2048;
  static constexpr int64_t kLayerBytes = 256;

  Cache(std::shared_ptr<Owner> owner, CacheSpec spec)
      : owner(std::move(owner)), spec(std::move(spec)) {
    for (const LayerShape& shape : this->spec.shapes) {
      LayerShape one = shape;
      one.layers = 1;
      shapes.insert(shapes.end(), static_cast<size_t>(shape.layers), one);
    }
  }
  ~Cache() { owner->bytes -= charged + charged_tables; }

  // Charges the owner for what the pages of a changed layer take now.
  void Settle(int64_t bytes_before, const PageList& layer) {
    owner->bytes += layer.bytes() - bytes_before;
    charged += layer.bytes() - bytes_before;
  }
  // Whether a call for `other` may be answered with this cache of the same name.
  bool WasMadeAs(const Cache& other) const {
    return spec.shapes == other.spec.shapes && spec.first_position == other.spec.first_position &&
           forked_from == other.forked_from && forked_length == other.forked_length;
  }

  // Constant once inserted.
  const std::shared_ptr<Owner> owner;
  CacheSpec spec;
  std::vector<LayerShape> shapes;  // of each layer
  std::string id;
  uint64_t number = 0;
  std::string forked_from;
  int64_t forked_length = 0;
  Arena::Charge record;

  Instant expires;         // guarded by the store's mutex
  Instant queued_expiry;   // its place in leases_; likewise
  bool is_linked = false;  // likewise

  Mutex mutex;  // guards what follows; of several caches, locked in the order of their addresses
  std::vector<PageList> layers;
  uint64_t generation = 1;
  int64_t charged = 0;
  int64_t charged_tables = 0;           // of tokens that were imported as evicted
  std::optional<int64_t> truncated_to;  // by the last Truncate(), while nothing was appended since
};

// Holds the mutexes of several caches.
class CacheStore::Locks {
 public:
  explicit Locks(absl::Span<const std::shared_ptr<Cache>> caches) ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (const auto& cache : caches) {
      if (cache != nullptr) caches_.push_back(cache.get());
    }
    std::sort(caches_.begin(), caches_.end());
    caches_.erase(std::unique(caches_.begin(), caches_.end()), caches_.end());
    for (Cache* cache : caches_) cache->mutex.Lock();
  }
  ~Locks() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (Cache* cache : caches_) cache->mutex.Unlock();
  }
  Locks(const Locks&) = delete;
  Locks& operator=(const Locks&) = delete;

 private:
  std::vector<Cache*> caches_;
};

CacheStore::CacheStore(Options options, Arena& arena, const Clock& clock)
    : options_(std::move(options)), arena_(arena), clock_(clock) {
  SetInstance(options_.instance);
}

void CacheStore::SetInstance(const std::string& instance) {
  RAPT_CHECK(instance.size() <= kMaxInstanceBytes, "the instance's name fits into an id");
  options_.instance = instance;
  id_prefix_ = absl::StrCat(instance, ":", RandomHex(4), ":");
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

absl::Status CacheStore::Fail(Reason reason, absl::StatusCode code,
                              absl::string_view message) const {
  ++refused_[static_cast<size_t>(reason)];
  return cache::Fail(reason, code, message);
}

absl::Status CacheStore::CheckCreating() const {
  if (creating_) return absl::OkStatus();
  return Fail(Reason::kDraining, absl::StatusCode::kUnavailable,
              "the server is draining and makes no new caches");
}

absl::Status CacheStore::CheckGeneration(const Cache& cache, uint64_t generation) const {
  if (generation == cache.generation) return absl::OkStatus();
  return Fail(Reason::kGeneration, absl::StatusCode::kAborted,
              absl::StrCat("generation is ", generation, "; the cache has ", cache.generation));
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

absl::StatusOr<std::chrono::nanoseconds> CacheStore::LeaseOf(
    std::chrono::nanoseconds wanted, std::chrono::nanoseconds otherwise) const {
  if (wanted.count() < 0) {
    return Invalid(absl::StrCat("lease_ms is ", Milliseconds(wanted), "; it must be at least 0"));
  }
  return std::min(wanted.count() == 0 ? otherwise : wanted, options_.max_lease);
}

absl::Status CacheStore::Charge(Cache& cache, int64_t bytes) const {
  const int64_t limit = options_.max_bytes_per_caller;
  if (!cache.owner->TryCharge(bytes, limit)) {
    return Fail(Reason::kQuota, absl::StatusCode::kResourceExhausted,
                absl::StrCat("needs ", bytes, " bytes of pages, ",
                             std::max<int64_t>(0, limit - cache.owner->bytes),
                             " are left of the caller's quota of ", limit));
  }
  cache.charged += bytes;
  return absl::OkStatus();
}

absl::Status CacheStore::ReserveMore(Cache& cache, PageList& list, int64_t count) const {
  // More than the arena can have is not charged; Reserve() refuses it.
  const int64_t missing =
      count > arena_.capacity_bytes() ? 0 : list.MissingBytes(count).value_or(0);
  if (absl::Status status = Charge(cache, missing); !status.ok()) return status;
  absl::Status status = list.Reserve(count);
  if (status.ok()) return status;
  cache.owner->bytes -= missing;
  cache.charged -= missing;
  return Fail(Reason::kPages, status.code(), status.message());
}

absl::Status CacheStore::ReserveTokens(Cache& cache, int64_t tokens) {
  if (absl::Status status = AtLeast("reserve_tokens", tokens, 0); !status.ok()) return status;
  for (PageList& list : cache.layers) {
    const int64_t more = std::max<int64_t>(0, tokens - list.length());
    if (absl::Status status = ReserveMore(cache, list, more); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<CacheStore::Cache>> CacheStore::NewCache(
    std::shared_ptr<Owner> owner, CacheSpec spec, int64_t pages) {
  auto cache = std::make_shared<Cache>(std::move(owner), std::move(spec));
  const auto layers = static_cast<int64_t>(cache->shapes.size());
  absl::StatusOr<Arena::Charge> record =
      arena_.TryCharge(Cache::kRecordBytes + layers * Cache::kLayerBytes + pages * kPageTableBytes);
  if (!record.ok()) {
    return Fail(Reason::kPages, record.status().code(), record.status().message());
  }
  cache->record = *std::move(record);
  cache->id = NewId();
  return cache;
}

absl::StatusOr<std::optional<CacheInfo>> CacheStore::FindNamed(const Cache& wanted) {
  if (wanted.spec.name.empty()) return std::nullopt;
  Handle handle;
  {
    MutexLock lock(mutex_);
    const auto found = wanted.owner->named.find(wanted.spec.name);
    if (found == wanted.owner->named.end()) return std::nullopt;
    if (found->second->expires <= clock_.Now()) return std::nullopt;
    handle = {found->second, found->second->expires};
  }
  if (!handle.cache->WasMadeAs(wanted)) {
    return absl::AlreadyExistsError(
        absl::StrCat("name: the cache '", wanted.spec.name,
                     "' exists with other shapes, type or first_position, or of another fork"));
  }
  return InfoOf(*handle.cache, handle.expires);
}

absl::StatusOr<std::optional<CacheInfo>> CacheStore::Link(const std::shared_ptr<Cache>& cache) {
  const std::string& name = cache->spec.name;
  Owner& owner = *cache->owner;
  Instant expires;
  {
    Gone gone;
    MutexLock lock(mutex_);
    ExpireLocked(clock_.Now(), gone);
    if (!name.empty() && owner.named.contains(name)) return std::nullopt;
    const auto count = static_cast<int64_t>(owner.caches.size());
    if (count >= options_.max_caches_per_caller) {
      return Fail(Reason::kQuota, absl::StatusCode::kResourceExhausted,
                  absl::StrCat("the caller has ", count, " caches, which is its quota"));
    }
    cache->number = next_number_++;
    cache->is_linked = true;
    expires = clock_.Now() + cache->spec.lease;
    cache->expires = cache->queued_expiry = expires;
    caches_[cache->id] = cache;
    owner.caches[cache->number] = cache;
    if (!name.empty()) owner.named[name] = cache;
    leases_.insert({expires, cache.get()});
  }
  return InfoOf(*cache, expires);
}

absl::StatusOr<CacheInfo> CacheStore::Insert(const std::shared_ptr<Cache>& cache) {
  absl::StatusOr<std::optional<CacheInfo>> linked = Link(cache);
  if (!linked.ok()) return linked.status();
  if (*linked) return **std::move(linked);
  // Another call was first with this name.
  absl::StatusOr<std::optional<CacheInfo>> other = FindNamed(*cache);
  if (!other.ok()) return other.status();
  if (*other) return **std::move(other);
  return absl::AbortedError(absl::StrCat("name: the cache '", cache->spec.name,
                                         "' was made and closed by another call meanwhile"));
}

absl::StatusOr<std::shared_ptr<CacheStore::Cache>> CacheStore::NewCacheOf(const std::string& owner,
                                                                          const CacheSpec& spec) {
  if (absl::Status status = CheckCreating(); !status.ok()) return status;
  if (absl::Status status = Validate(spec); !status.ok()) return status;
  const auto lease = LeaseOf(spec.lease, options_.default_lease);
  if (!lease.ok()) return lease.status();
  CacheSpec made = spec;
  made.lease = *lease;
  std::shared_ptr<Owner> made_by;
  {
    MutexLock lock(mutex_);
    made_by = OwnerOf(owner);
  }
  auto cache = NewCache(std::move(made_by), std::move(made), /*pages=*/0);
  if (!cache.ok()) return cache.status();
  for (const LayerShape& shape : (*cache)->shapes) {
    (*cache)->layers.emplace_back(arena_, shape.token);
  }
  return cache;
}

absl::StatusOr<CacheInfo> CacheStore::Create(const std::string& owner, const CacheSpec& spec) {
  auto cache = NewCacheOf(owner, spec);
  if (!cache.ok()) return cache.status();
  absl::StatusOr<std::optional<CacheInfo>> named = FindNamed(**cache);
  if (!named.ok()) return named.status();
  if (*named) return **std::move(named);
  absl::Status status = ReserveTokens(**cache, spec.reserve_tokens);
  if (!status.ok()) return status;
  return Insert(*cache);
}

absl::StatusOr<CacheSnapshot> CacheStore::Freeze(const std::string& owner, const std::string& id,
                                                 uint64_t generation) {
  const absl::StatusOr<Handle> handle = FindLive(owner, id);
  if (!handle.ok()) return handle.status();
  Cache& cache = *handle->cache;
  CacheSnapshot snapshot{.spec = cache.spec, .shapes = cache.shapes, .layers = {}};
  MutexLock lock(cache.mutex);
  if (absl::Status status = CheckGeneration(cache, generation); !status.ok()) return status;
  for (const PageList& layer : cache.layers) snapshot.layers.push_back(layer.Take(layer.length()));
  return snapshot;
}

absl::StatusOr<CacheStore::Draft> CacheStore::StartDraft(const std::string& owner,
                                                         const CacheSpec& spec) {
  auto cache = NewCacheOf(owner, spec);
  if (!cache.ok()) return cache.status();
  Gone gone;
  MutexLock lock(mutex_);
  ExpireLocked(clock_.Now(), gone);
  if ((*cache)->owner->named.contains(spec.name)) return NameInUse(spec.name);
  return Draft(*this, *std::move(cache));
}

absl::StatusOr<CacheInfo> CacheStore::Publish(Draft draft) {
  if (absl::Status status = CheckCreating(); !status.ok()) return status;
  Cache& cache = *draft.cache_;
  absl::Status status = ReserveTokens(cache, cache.spec.reserve_tokens);
  if (!status.ok()) return status;
  absl::StatusOr<std::optional<CacheInfo>> linked = Link(draft.cache_);
  if (!linked.ok()) return linked.status();
  if (!*linked) return NameInUse(cache.spec.name);
  return **std::move(linked);
}

absl::Span<const LayerShape> CacheStore::Draft::shapes() const { return cache_->shapes; }

int64_t CacheStore::Draft::length(int64_t layer) const {
  return cache_->layers[static_cast<size_t>(layer)].length();
}

absl::Status CacheStore::Draft::Append(int64_t layer, int64_t count, const std::byte* keys,
                                       const std::byte* values) {
  if (absl::Status status = store_->CheckCreating(); !status.ok()) return status;
  PageList& list = cache_->layers[static_cast<size_t>(layer)];
  absl::Status status = store_->ReserveMore(*cache_, list, count);
  if (status.ok()) list.Append(count, keys, values);
  return status;
}

absl::Status CacheStore::Draft::Skip(int64_t layer, int64_t at, int64_t length) {
  const LayerShape& shape = cache_->shapes[static_cast<size_t>(layer)];
  PageList& list = cache_->layers[static_cast<size_t>(layer)];
  const TokenRange gap = {list.length(), at};
  const TokenRange unseen = UnseenFrom(length, shape, cache_->spec.first_position);
  const bool is_whole = gap.begin % kPageTokens == 0 && gap.end % kPageTokens == 0;
  if (!is_whole || gap.begin < unseen.begin || gap.end > unseen.end || !list.evicted().empty()) {
    const std::string allowed =
        unseen.empty() ? "the layer evicts none"
                       : absl::StrCat("one range of multiples of ", kPageTokens, " within ",
                                      unseen.begin, " to ", unseen.end, " may be");
    return Invalid(absl::StrCat("tokens ", gap.begin, " to ", gap.end, " of layer ", layer,
                                " are missing; ", allowed));
  }
  // Tables without pages would escape the quota. More than the arena can have is not charged;
  // PageList::Skip() refuses it.
  const int64_t tables = length > store_->arena_.capacity_bytes()
                             ? 0
                             : (gap.end - gap.begin) / kPageTokens * kPageTableBytes;
  if (absl::Status status = store_->Charge(*cache_, tables); !status.ok()) return status;
  cache_->charged -= tables;
  cache_->charged_tables += tables;
  absl::Status status = list.Skip(gap.end - gap.begin, length);
  if (status.ok()) return status;
  return store_->Fail(Reason::kPages, status.code(), status.message());
}

absl::StatusOr<CacheInfo> CacheStore::Fork(const std::string& owner, const ForkSpec& spec) {
  if (absl::Status status = CheckCreating(); !status.ok()) return status;
  if (absl::Status status = ValidateName(spec.name); !status.ok()) return status;
  const absl::StatusOr<Handle> parent = FindLive(owner, spec.cache);
  if (!parent.ok()) return parent.status();
  Cache& from = *parent->cache;
  const auto lease = LeaseOf(spec.lease, from.spec.lease);
  if (!lease.ok()) return lease.status();
  CacheSpec made = from.spec;
  made.name = spec.name;
  made.reserve_tokens = spec.reserve_tokens;
  made.lease = *lease;
  std::shared_ptr<Cache> fork;
  int64_t bytes = 0;
  {
    MutexLock lock(from.mutex);
    if (absl::Status status = CheckGeneration(from, spec.generation); !status.ok()) return status;
    int64_t least = std::numeric_limits<int64_t>::max();
    for (const PageList& layer : from.layers) least = std::min(least, layer.length());
    const int64_t length = spec.length.value_or(least);
    if (length < 0 || length > least) {
      return absl::OutOfRangeError(
          absl::StrCat("length is ", length, "; the shortest layer has ", least, " tokens"));
    }
    if (absl::Status status = CheckCut(from, length); !status.ok()) return status;
    const auto layers = static_cast<int64_t>(from.layers.size());
    auto cache = NewCache(from.owner, std::move(made), layers * PageList::PagesOf(length));
    if (!cache.ok()) return cache.status();
    fork = *std::move(cache);
    fork->forked_from = from.id;
    fork->forked_length = length;
    for (const PageList& layer : from.layers) {
      fork->layers.push_back(layer.Fork(length));
      bytes += fork->layers.back().bytes();
    }
  }
  absl::StatusOr<std::optional<CacheInfo>> named = FindNamed(*fork);
  if (!named.ok()) return named.status();
  if (*named) return **std::move(named);
  absl::Status status = Charge(*fork, bytes);
  if (status.ok()) status = ReserveTokens(*fork, spec.reserve_tokens);
  if (!status.ok()) return status;
  return Insert(fork);
}

// FailedPrecondition if the next row after `length` tokens needs an evicted one.
absl::Status CacheStore::CheckCut(const Cache& cache, int64_t length) const {
  for (size_t n = 0; n < cache.layers.size(); ++n) {
    if (!NeedsEvicted(length, cache.shapes[n], cache.layers[n])) continue;
    const TokenRange& evicted = cache.layers[n].evicted();
    return Fail(Reason::kEvicted, absl::StatusCode::kFailedPrecondition,
                absl::StrCat("length is ", length, "; the next row would see tokens that layer ", n,
                             " has evicted: ", evicted.begin, " to ", evicted.end));
  }
  return absl::OkStatus();
}

absl::Status CacheStore::TruncateLayers(Cache& cache, int64_t length) const {
  for (size_t n = 0; n < cache.layers.size(); ++n) {
    if (length >= 0 && length <= cache.layers[n].length()) continue;
    return absl::OutOfRangeError(absl::StrCat("length is ", length, "; layer ", n, " has ",
                                              cache.layers[n].length(), " tokens"));
  }
  if (absl::Status status = CheckCut(cache, length); !status.ok()) return status;
  const int64_t reserve = cache.spec.reserve_tokens;
  std::vector<int64_t> bytes, reserved;
  absl::Status status;
  for (PageList& layer : cache.layers) {
    bytes.push_back(layer.bytes());
    reserved.push_back(layer.reserved_pages());
    status = layer.ReserveToTruncate(length, reserve);
    if (!status.ok()) break;
  }
  for (size_t n = 0; n < bytes.size(); ++n) {
    PageList& layer = cache.layers[n];
    status.ok() ? layer.Truncate(length, reserve) : layer.KeepReserved(reserved[n]);
    cache.Settle(bytes[n], layer);
  }
  if (status.ok()) return status;
  return Fail(Reason::kPages, status.code(),
              absl::StrCat("for reserve_tokens: ", std::string(status.message())));
}

absl::StatusOr<CacheInfo> CacheStore::Truncate(const std::string& owner, const std::string& id,
                                               int64_t length, uint64_t generation) {
  const absl::StatusOr<Handle> handle = FindLive(owner, id);
  if (!handle.ok()) return handle.status();
  Cache& cache = *handle->cache;
  {
    MutexLock lock(cache.mutex);
    const bool is_repeated = cache.truncated_to == length && generation + 1 == cache.generation;
    if (!is_repeated) {
      absl::Status status = CheckGeneration(cache, generation);
      if (status.ok()) status = TruncateLayers(cache, length);
      if (!status.ok()) return status;
      ++cache.generation;
      cache.truncated_to = length;
    }
  }
  return InfoOf(cache, handle->expires);
}

CacheInfo CacheStore::InfoOf(Cache& cache, Instant expires) const {
  CacheInfo info;
  info.id = cache.id;
  info.spec = cache.spec;
  info.expires_in = std::max(std::chrono::nanoseconds(0), expires - clock_.Now());
  MutexLock lock(cache.mutex);
  for (const PageList& layer : cache.layers) {
    info.lengths.push_back(layer.length());
    info.shared_bytes += layer.shared_bytes();
  }
  info.generation = cache.generation;
  info.bytes = cache.charged;
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

absl::StatusOr<CacheStore::Handle> CacheStore::Find(const std::string& owner, const std::string& id,
                                                    bool renews) {
  const auto found = caches_.find(id);
  if (found == caches_.end() || found->second->owner->name != owner) {
    const Reason reason = WhyMissing(owner, id);
    return Fail(reason, absl::StatusCode::kNotFound,
                absl::StrCat("cache: '", id.substr(0, 2 * kMaxInstanceBytes),
                             "' is not found: ", std::string(NameOf(reason))));
  }
  Cache& cache = *found->second;
  if (renews) cache.expires = clock_.Now() + cache.spec.lease;
  return Handle{found->second, cache.expires};
}

absl::StatusOr<CacheStore::Handle> CacheStore::FindLive(const std::string& owner,
                                                        const std::string& id) {
  Gone gone;
  MutexLock lock(mutex_);
  ExpireLocked(clock_.Now(), gone);
  return Find(owner, id, /*renews=*/false);
}

void CacheStore::Unlink(const std::shared_ptr<Cache>& cache, Reason reason) {
  if (!cache->is_linked) return;
  cache->is_linked = false;
  Owner& owner = *cache->owner;
  leases_.erase({cache->queued_expiry, cache.get()});
  tombstones_[cache->id] = {owner.name, reason};
  tombstone_order_.push_back(cache->id);
  if (tombstone_order_.size() > kTombstones) {
    tombstones_.erase(tombstone_order_.front());
    tombstone_order_.pop_front();
  }
  if (!cache->spec.name.empty()) owner.named.erase(cache->spec.name);
  owner.caches.erase(cache->number);
  caches_.erase(cache->id);
}

void CacheStore::ExpireLocked(Instant now, Gone& gone) {
  while (!leases_.empty() && leases_.begin()->first <= now) {
    Cache& first = *leases_.begin()->second;
    if (first.expires > now) {
      leases_.erase(leases_.begin());
      first.queued_expiry = first.expires;
      leases_.insert({first.expires, &first});
      continue;
    }
    gone.push_back(caches_.at(first.id));
    Unlink(gone.back(), Reason::kExpired);
    ++expired_;
  }
}

Instant CacheStore::Expire() {
  Gone gone;
  MutexLock lock(mutex_);
  ExpireLocked(clock_.Now(), gone);
  return leases_.empty() ? Instant::max() : leases_.begin()->first;
}

absl::StatusOr<CacheList> CacheStore::ForEach(const std::string& owner,
                                              absl::Span<const std::string> ids, Action action) {
  CacheList list;
  std::vector<Handle> handles;
  absl::Status first;
  {
    Gone gone;
    MutexLock lock(mutex_);
    ExpireLocked(clock_.Now(), gone);
    for (const std::string& id : ids) {
      absl::StatusOr<Handle> handle = Find(owner, id, action == Action::kRenew);
      if (handle.ok()) {
        handles.push_back(*std::move(handle));
        continue;
      }
      first.Update(handle.status());
      list.missing.push_back({id, ReasonOf(handle.status())});
    }
  }
  if (handles.empty() && !first.ok()) return first;
  for (const Handle& handle : handles) list.caches.push_back(InfoOf(*handle.cache, handle.expires));
  if (action == Action::kClose) {
    MutexLock lock(mutex_);
    for (const Handle& handle : handles) Unlink(handle.cache, Reason::kClosed);
  }
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
    Gone gone;
    MutexLock lock(mutex_);
    ExpireLocked(clock_.Now(), gone);
    const auto found = owners_.find(owner);
    if (found == owners_.end()) return list;
    const auto& caches = found->second->caches;
    for (auto next = caches.upper_bound(after); next != caches.end(); ++next) {
      if (!absl::StartsWith(next->second->spec.name, name_prefix)) continue;
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

bool CacheStore::Has(const std::string& owner, const std::string& id) const {
  MutexLock lock(mutex_);
  const auto found = caches_.find(id);
  return found != caches_.end() && found->second->owner->name == owner &&
         found->second->expires > clock_.Now();
}

// Checks everything but the tokens.
absl::Status CacheStore::CheckPlace(const Cache& cache, const LayerCall& call,
                                    LayerState& state) const {
  if (call.layer < 0 || call.layer >= static_cast<int64_t>(cache.layers.size())) {
    return Invalid(
        absl::StrCat("layer is ", call.layer, "; the cache has ", cache.layers.size(), " layers"));
  }
  const auto layer = static_cast<size_t>(call.layer);
  state.shape = cache.shapes[layer];
  state.first_position = cache.spec.first_position;
  state.length = cache.layers[layer].length();
  state.at = call.at.value_or(state.length);
  if (!call.at && call.count > 0) return Invalid("at is absent; new tokens need it");
  if (absl::Status status = CheckGeneration(cache, call.generation); !status.ok()) return status;
  if (state.at < 0 || state.at > state.length) {
    return absl::OutOfRangeError(
        absl::StrCat("at is ", state.at, "; the layer has ", state.length, " tokens"));
  }
  if (state.at == state.length || call.count <= state.length - state.at) return absl::OkStatus();
  return Fail(Reason::kConflict, absl::StatusCode::kAborted,
              absl::StrCat("at is ", state.at, " and ", call.count, " tokens come; the layer has ",
                           state.length, " tokens, which is in the middle of them"));
}

absl::StatusOr<CacheStore::Batch> CacheStore::Open(const std::string& owner,
                                                   absl::Span<const LayerCall> calls,
                                                   std::string field) {
  absl::flat_hash_set<std::pair<absl::string_view, int64_t>> seen;
  for (size_t n = 0; n < calls.size(); ++n) {
    if (seen.insert({calls[n].cache, calls[n].layer}).second) continue;
    return Invalid(
        absl::StrCat(field, "[", n, "]: layer ", calls[n].layer, " of the cache occurs twice"));
  }
  Batch batch;
  batch.field_ = std::move(field);
  batch.calls_.assign(calls.begin(), calls.end());
  batch.states_.resize(calls.size());
  batch.caches_.resize(calls.size());
  {
    Gone gone;
    MutexLock lock(mutex_);
    ExpireLocked(clock_.Now(), gone);
    for (size_t n = 0; n < calls.size(); ++n) {
      absl::StatusOr<Handle> handle = Find(owner, calls[n].cache, /*renews=*/true);
      if (handle.ok()) {
        batch.caches_[n] = std::move(handle->cache);
      } else {
        batch.states_[n].status = handle.status();
      }
    }
  }
  for (size_t n = 0; n < calls.size(); ++n) {
    if (batch.caches_[n] == nullptr) continue;
    Cache& cache = *batch.caches_[n];
    MutexLock lock(cache.mutex);
    LayerState& state = batch.states_[n];
    state.status = CheckPlace(cache, calls[n], state);
    if (!state.status.ok()) continue;
    state.before = cache.layers[static_cast<size_t>(calls[n].layer)].Take(state.at);
  }
  return batch;
}

absl::Status CacheStore::Batch::FirstError(bool partial) const {
  for (size_t n = 0; n < states_.size(); ++n) {
    const absl::Status& status = states_[n].status;
    if (status.ok() || (partial && !absl::IsInvalidArgument(status))) continue;
    return Prefixed(status, absl::StrCat(field_, "[", n, "]: "));
  }
  return absl::OkStatus();
}

// Checks the tokens of one layer and reserves its pages.
absl::Status CacheStore::Prepare(Cache& cache, const LayerCall& call, const NewTokens& tokens,
                                 AppendResult& result) const {
  LayerState state;
  absl::Status place = CheckPlace(cache, call, state);
  result.length = state.length;
  if (!place.ok()) return place;
  PageList& list = cache.layers[static_cast<size_t>(call.layer)];
  for (const TokenRange& range : {tokens.visible.first, tokens.visible.recent}) {
    if (!list.evicted().Overlaps(range)) continue;
    return Fail(Reason::kEvicted, absl::StatusCode::kFailedPrecondition,
                absl::StrCat("a row sees tokens that the layer has evicted: ", list.evicted().begin,
                             " to ", list.evicted().end));
  }
  if (state.at == state.length) return ReserveMore(cache, list, call.count);
  result.applied_before = call.count > 0;
  if (list.Holds(state.at, call.count, tokens.keys, tokens.values)) return absl::OkStatus();
  return Fail(
      Reason::kConflict, absl::StatusCode::kAborted,
      absl::StrCat("the layer has other tokens from ", state.at, " to ", state.at + call.count));
}

// Frees what neither a row of the call nor a later one can see.
void CacheStore::Evict(const Cache& cache, const LayerCall& call, const NewTokens& tokens,
                       PageList& list) {
  const int64_t at = list.length() - call.count;
  const int64_t row = std::min(at, tokens.first_row.value_or(at));
  list.Evict(
      UnseenFrom(row, cache.shapes[static_cast<size_t>(call.layer)], cache.spec.first_position));
}

absl::StatusOr<std::vector<AppendResult>> CacheStore::Append(const Batch& batch,
                                                             absl::Span<const NewTokens> tokens,
                                                             bool partial) {
  const size_t count = batch.calls_.size();
  std::vector<AppendResult> results(count);
  // What a layer had before it reserved pages.
  struct Before {
    int64_t bytes, reserved_pages;
  };
  std::vector<Before> before(count);
  const Locks locks(batch.caches_);
  absl::Status first;
  for (size_t n = 0; n < count; ++n) {
    AppendResult& result = results[n];
    result.status = batch.states_[n].status;
    result.length = batch.states_[n].length;
    if (result.status.ok()) {
      Cache& cache = *batch.caches_[n];
      const PageList& list = cache.layers[static_cast<size_t>(batch.calls_[n].layer)];
      before[n].reserved_pages = list.reserved_pages();
      result.status = Prepare(cache, batch.calls_[n], tokens[n], result);
      before[n].bytes = list.bytes();
    }
    if (!result.status.ok()) {
      first.Update(Prefixed(result.status, absl::StrCat(batch.field_, "[", n, "]: ")));
    }
  }
  const bool fails = !partial && !first.ok();
  for (size_t n = 0; n < count; ++n) {
    if (!results[n].status.ok()) continue;
    const LayerCall& call = batch.calls_[n];
    Cache& cache = *batch.caches_[n];
    PageList& list = cache.layers[static_cast<size_t>(call.layer)];
    const int64_t at = call.at.value_or(list.length());
    if (fails) {
      list.KeepReserved(before[n].reserved_pages);
    } else if (call.count > 0 && !results[n].applied_before) {
      list.Append(call.count, tokens[n].keys, tokens[n].values);
      cache.truncated_to.reset();
      Evict(cache, call, tokens[n], list);
    }
    cache.Settle(before[n].bytes, list);
    results[n].length = list.length();
    if (!fails) results[n].snapshot = list.Take(at + call.count);
  }
  if (fails) return first;
  return results;
}

void CacheStore::ExportTo(MetricSink& metrics) {
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  metrics.AddGauge("rapt_kv_limit_bytes", "Memory for resident keys and values.", {},
                   [=, this] { return number(arena_.capacity_bytes()); });
  metrics.AddGauge(
      "rapt_kv_used_bytes",
      "Memory in use for them, with reserved pages, tables and free places in between.", {},
      [=, this] { return number(arena_.committed_bytes()); });
  metrics.AddGauge("rapt_kv_reserved_bytes", "Pages taken by reserve_tokens and not yet written.",
                   {}, [=, this] { return number(SumOfAll().reserved); });
  metrics.AddGauge("rapt_kv_shared_bytes",
                   "Bytes that caches reach beyond those of their pages, because they share some.",
                   {}, [=, this] { return number(SumOfAll().shared); });
  metrics.AddGauge("rapt_kv_caches", "Live caches.", {}, [=, this] { return number(caches()); });
  metrics.AddCounter("rapt_kv_expired_total", "Caches whose lease ran out.", {},
                     [=, this] { return number(expired_); });
  metrics.AddCounter("rapt_kv_read_bytes_total", "Keys and values that calls have read.", {},
                     [=, this] { return number(read_bytes_); });
  metrics.AddCounter("rapt_kv_saved_bytes_total",
                     "Keys and values that were read once for several items of a call.", {},
                     [=, this] { return number(saved_bytes_); });
  for (int n = 1; n < kReasons; ++n) {
    const auto reason = static_cast<Reason>(n);
    metrics.AddCounter("rapt_kv_refused_total", "Refusals, by rapt-reason.",
                       {{"reason", std::string(NameOf(reason))}},
                       [=, this] { return number(refused_[static_cast<size_t>(reason)]); });
  }
}

CacheStore::Sums CacheStore::SumOfAll() const {
  std::vector<std::shared_ptr<Cache>> caches;
  {
    MutexLock lock(mutex_);
    for (const auto& [id, cache] : caches_) caches.push_back(cache);
  }
  Sums sums;
  int64_t reached = 0;
  for (const auto& cache : caches) {
    MutexLock lock(cache->mutex);
    reached += cache->charged;
    for (const PageList& layer : cache->layers) sums.reserved += layer.reserved_bytes();
  }
  sums.shared = std::max<int64_t>(0, reached - arena_.used_bytes());
  return sums;
}

}  // namespace rapt::cache
