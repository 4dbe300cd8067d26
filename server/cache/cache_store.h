// The caches of all callers: their names, leases, quotas and tokens.
#ifndef RAPT_SERVER_CACHE_CACHE_STORE_H_
#define RAPT_SERVER_CACHE_CACHE_STORE_H_

#include <array>
#include <atomic>
#include <chrono>
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
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "base/clock.h"
#include "base/metric_sink.h"
#include "base/mutex.h"
#include "server/cache/arena.h"
#include "server/cache/page_list.h"
#include "server/cache/reason.h"

namespace rapt::cache {

// `layers` layers of one form.
struct LayerShape {
  int64_t layers = 1;
  TokenShape token;
  // A token at position t stays while t < keep_first, or a row at position p with p - t < keep_last
  // may come. keep_last 0: all stay.
  int64_t keep_first = 0;
  int64_t keep_last = 0;

  bool operator==(const LayerShape&) const = default;
};
inline constexpr int64_t kMaxLayers = 1024;

// A new cache, and a fork.
struct CacheSpec {
  std::string name = {};  // empty: every call makes a new cache
  std::vector<LayerShape> shapes = {};
  int64_t first_position = 0;
  int64_t reserve_tokens = 0;         // pages for this many tokens of every layer are taken at once
  std::chrono::nanoseconds lease{0};  // 0: the default
};
struct ForkSpec {
  std::string cache = {};
  uint64_t generation = 0;             // of `cache`
  std::optional<int64_t> length = {};  // absent: the least of the layers' lengths
  std::string name = {};
  int64_t reserve_tokens = 0;
  std::chrono::nanoseconds lease{0};  // 0: as `cache`
};

// The state of a cache at one time.
struct CacheInfo {
  std::string id;
  CacheSpec spec;                // the lease as it is
  std::vector<int64_t> lengths;  // of each layer
  uint64_t generation = 1;
  std::chrono::nanoseconds expires_in{0};
  int64_t bytes = 0;         // of the pages that it reaches, with those reserved
  int64_t shared_bytes = 0;  // of them, what other caches or running calls reach as well
};

struct Missing {
  std::string id;
  Reason reason = Reason::kUnknown;
};

// In the order of the request.
struct CacheList {
  std::vector<CacheInfo> caches;
  std::vector<Missing> missing;
  std::string next_page_token;  // of List(); empty: there is no more
};

// One layer of a cache in a call.
struct LayerCall {
  std::string cache = {};
  int64_t layer = 0;
  uint64_t generation = 0;
  // The tokens that the layer has before the call. Absent, with count 0 alone: its length.
  std::optional<int64_t> at = {};
  int64_t count = 0;  // of new tokens
};

// What such a call finds.
struct LayerState {
  absl::Status status = {};
  // The rest has a meaning if the cache and the layer exist.
  LayerShape shape = {};  // of one layer
  int64_t first_position = 0;
  int64_t length = 0;  // of the layer
  int64_t at = 0;
  std::optional<Snapshot> before = {};  // of the first `at` tokens, if the status is OK
};

// New tokens: keys [count, Hkv, D] and values [count, Hkv, Dv], row-major.
struct NewTokens {
  const std::byte* keys = nullptr;
  const std::byte* values = nullptr;
  // The tokens that the call's own rows may see, which must not be evicted; and the token of the
  // first row, which limits what the call evicts.
  VisibleTokens visible = {};
  std::optional<int64_t> first_row = {};
};

struct AppendResult {
  absl::Status status = {};
  int64_t length = 0;           // of the layer, after the call
  bool applied_before = false;  // the tokens were there already
  std::optional<Snapshot> snapshot =
      {};  // of the layer's first at + count tokens, if the status is OK
};

// What a cache holds at one time. Other calls do not affect it.
struct CacheSnapshot {
  CacheSpec spec;                  // the lease as it is
  std::vector<LayerShape> shapes;  // of each layer
  std::vector<Snapshot> layers;
};

// A cache belongs to the caller who made it, and does not exist for others. Its lease is renewed by
// Open() and Renew(); a cache whose lease has run out is gone. Memory is free when the last
// snapshot of a cache that is gone has ended.
//
// NOT_FOUND, ABORTED, FAILED_PRECONDITION, RESOURCE_EXHAUSTED and UNAVAILABLE carry a Reason. Other
// statuses: INVALID_ARGUMENT for shapes, numbers and names that are not allowed; OUT_OF_RANGE for
// tokens that a layer does not have.
//
// Thread-safe. Everything that it references outlives it.
class CacheStore {
 public:
  struct Options {
    std::string instance = {};  // part of every id; at most kMaxInstanceBytes
    int64_t max_caches_per_caller = 65536;
    int64_t max_bytes_per_caller = 0;  // 0: no limit
    std::chrono::nanoseconds default_lease = std::chrono::minutes(10);
    std::chrono::nanoseconds max_lease = std::chrono::hours(24);
  };
  static constexpr size_t kMaxInstanceBytes = 86;
  static constexpr size_t kMaxNameBytes = 256;
  static constexpr int64_t kMaxListed = 1000;

  CacheStore(Options options, Arena& arena, const Clock& clock);
  // Replaces Options::instance. REQUIRES: no other method has been called.
  void SetInstance(const std::string& instance);
  ~CacheStore();
  CacheStore(const CacheStore&) = delete;
  CacheStore& operator=(const CacheStore&) = delete;

  // Returns the caller's cache of that name if it was made with the same shapes and first position,
  // ALREADY_EXISTS if with others, else a new cache.
  absl::StatusOr<CacheInfo> Create(const std::string& owner, const CacheSpec& spec);
  // Makes a cache with the first tokens of another one, whose pages it shares. Idempotent by name.
  absl::StatusOr<CacheInfo> Fork(const std::string& owner, const ForkSpec& spec);
  // Every layer keeps its first `length` tokens; the generation rises by one. Called again with the
  // same arguments, it returns the same as long as nothing was appended since.
  absl::StatusOr<CacheInfo> Truncate(const std::string& owner, const std::string& id,
                                     int64_t length, uint64_t generation);

  // NOT_FOUND if none of the caches is found.
  absl::StatusOr<CacheList> Get(const std::string& owner, absl::Span<const std::string> ids);
  absl::StatusOr<CacheList> Renew(const std::string& owner, absl::Span<const std::string> ids);
  absl::StatusOr<CacheList> Close(const std::string& owner, absl::Span<const std::string> ids);
  // Returns the caller's caches in the order of their making. 0: kMaxListed.
  absl::StatusOr<CacheList> List(const std::string& owner, int64_t page_size,
                                 absl::string_view page_token, absl::string_view name_prefix);

  // Returns whether the caller has this cache. Renews nothing.
  bool Has(const std::string& owner, const std::string& id) const;

  // The caches of one call, found when it came. They stay until it has ended, closed or not.
  class Batch;
  // Finds the layers of a call and checks what can be checked without their tokens: a state for
  // each, whose status may be an error. InvalidArgument for a layer that occurs twice. Errors name
  // a layer's place in `field`: "parts[2]: ".
  absl::StatusOr<Batch> Open(const std::string& owner, absl::Span<const LayerCall> calls,
                             std::string field = "parts");

  // Appends to each layer at its place: at = length is applied; tokens that the layer has already
  // are compared, and ABORTED if they are others. Evicts the tokens that no later row can see.
  // Unless `partial`, all are applied or none, and the status is that of the first that fails.
  // Layers whose state was an error fail with it. REQUIRES: `tokens` has an entry for each layer of
  // the batch.
  absl::StatusOr<std::vector<AppendResult>> Append(const Batch& batch,
                                                   absl::Span<const NewTokens> tokens,
                                                   bool partial = false);

  // Returns what a cache holds. Does not renew its lease.
  absl::StatusOr<CacheSnapshot> Freeze(const std::string& owner, const std::string& id,
                                       uint64_t generation);

  // A new cache that is not visible yet. Its destruction returns everything.
  class Draft;
  // Makes a draft. ALREADY_EXISTS if the caller has a live cache of that name; otherwise the
  // statuses of Create(). Nothing is reserved before Publish().
  absl::StatusOr<Draft> StartDraft(const std::string& owner, const CacheSpec& spec);
  // Makes the draft a cache. ALREADY_EXISTS as above; otherwise the statuses of Create().
  absl::StatusOr<CacheInfo> Publish(Draft draft);

  // From now on Create(), Fork() and all methods of drafts are UNAVAILABLE.
  void StopCreating() { creating_ = false; }

  // Ends the caches whose lease has run out. Returns when the next one will; max() without caches.
  Instant Expire();

  int64_t caches() const;
  std::chrono::nanoseconds default_lease() const { return options_.default_lease; }
  const Arena& arena() const { return arena_; }

  // Counts bytes of keys and values that a call reads, and those that it does not read again
  // because items share them.
  void CountRead(int64_t read, int64_t saved) {
    read_bytes_ += read;
    saved_bytes_ += saved;
  }

  // Exports rapt_kv_limit_bytes and its siblings.
  void ExportTo(MetricSink& metrics);

 private:
  struct Owner;
  struct Cache;
  class Locks;
  struct Handle {
    std::shared_ptr<Cache> cache;
    Instant expires;
  };

  std::string NewId();
  absl::Status CheckCreating() const;
  absl::StatusOr<std::chrono::nanoseconds> LeaseOf(std::chrono::nanoseconds wanted,
                                                   std::chrono::nanoseconds otherwise) const;
  absl::StatusOr<std::shared_ptr<Cache>> NewCache(std::shared_ptr<Owner> owner, CacheSpec spec,
                                                  int64_t pages);
  absl::Status ReserveTokens(Cache& cache, int64_t tokens);
  // Charges the owner for `bytes` more.
  absl::Status Charge(Cache& cache, int64_t bytes) const;
  // Checks the arguments of Create() and makes a cache that is not visible.
  absl::StatusOr<std::shared_ptr<Cache>> NewCacheOf(const std::string& owner,
                                                    const CacheSpec& spec);
  // Makes the cache visible; returns nullopt if its owner has another one of its name.
  absl::StatusOr<std::optional<CacheInfo>> Link(const std::shared_ptr<Cache>& cache);
  absl::StatusOr<CacheInfo> Insert(const std::shared_ptr<Cache>& cache);
  absl::StatusOr<std::optional<CacheInfo>> FindNamed(const Cache& wanted);
  std::shared_ptr<Owner> OwnerOf(const std::string& name) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Handle> Find(const std::string& owner, const std::string& id, bool renews)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  absl::StatusOr<Handle> FindLive(const std::string& owner, const std::string& id);
  Reason WhyMissing(const std::string& owner, absl::string_view id) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Unlink(const std::shared_ptr<Cache>& cache, Reason reason)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  using Gone = std::vector<std::shared_ptr<Cache>>;  // destroyed without the lock
  void ExpireLocked(Instant now, Gone& gone) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  CacheInfo InfoOf(Cache& cache, Instant expires) const;
  enum class Action : uint8_t { kGet, kRenew, kClose };
  absl::StatusOr<CacheList> ForEach(const std::string& owner, absl::Span<const std::string> ids,
                                    Action action);
  absl::Status Fail(Reason reason, absl::StatusCode code, absl::string_view message) const;
  absl::Status CheckGeneration(const Cache& cache, uint64_t generation) const;
  absl::Status CheckCut(const Cache& cache, int64_t length) const;
  absl::Status TruncateLayers(Cache& cache, int64_t length) const;
  absl::Status CheckPlace(const Cache& cache, const LayerCall& call, LayerState& state) const;
  absl::Status Prepare(Cache& cache, const LayerCall& call, const NewTokens& tokens,
                       AppendResult& result) const;
  absl::Status ReserveMore(Cache& cache, PageList& list, int64_t count) const;
  struct Sums {
    int64_t reserved = 0;
    int64_t shared = 0;
  };
  Sums SumOfAll() const;
  static void Evict(const Cache& cache, const LayerCall& call, const NewTokens& tokens,
                    PageList& list);

  Options options_;        // constant once caches are made
  std::string id_prefix_;  // names the instance and this start of it
  Arena& arena_;
  const Clock& clock_;
  std::atomic<bool> creating_{true};
  mutable std::array<std::atomic<int64_t>, kReasons> refused_{};  // by reason
  std::atomic<int64_t> expired_{0};
  std::atomic<int64_t> read_bytes_{0};
  std::atomic<int64_t> saved_bytes_{0};

  mutable Mutex mutex_;
  absl::flat_hash_map<std::string, std::shared_ptr<Owner>> owners_ ABSL_GUARDED_BY(mutex_);
  static constexpr size_t kFewOwners = 64;
  size_t most_owners_ ABSL_GUARDED_BY(mutex_) = kFewOwners;  // before unused ones are removed
  absl::flat_hash_map<std::string, std::shared_ptr<Cache>> caches_ ABSL_GUARDED_BY(mutex_);
  // By an expiry that may be earlier than the cache's, which later calls have renewed.
  std::set<std::pair<Instant, Cache*>> leases_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_number_ ABSL_GUARDED_BY(mutex_) = 1;
  // The last caches that are gone.
  struct Tombstone {
    std::string owner;
    Reason reason;
  };
  absl::flat_hash_map<std::string, Tombstone> tombstones_ ABSL_GUARDED_BY(mutex_);
  std::deque<std::string> tombstone_order_ ABSL_GUARDED_BY(mutex_);
};

class CacheStore::Batch {
 public:
  absl::Span<const LayerState> states() const { return states_; }
  // Returns the first error, with its place. If the call is `partial`, only INVALID_ARGUMENT
  // counts.
  absl::Status FirstError(bool partial) const;

 private:
  friend class CacheStore;

  std::string field_;
  std::vector<LayerCall> calls_;
  std::vector<LayerState> states_;
  std::vector<std::shared_ptr<Cache>> caches_;  // null: not found
};

// Movable; not thread-safe. The store outlives it.
class CacheStore::Draft {
 public:
  // Of each layer.
  absl::Span<const LayerShape> shapes() const;
  // Returns the tokens of a layer so far, evicted ones counted. REQUIRES: the layer exists.
  int64_t length(int64_t layer) const;

  // Appends tokens: keys [count, Hkv, D] and values [count, Hkv, Dv]. RESOURCE_EXHAUSTED as
  // CacheStore::Append().
  absl::Status Append(int64_t layer, int64_t count, const std::byte* keys, const std::byte* values);
  // Adds evicted tokens up to token `at` of a layer that will have `length` tokens.
  // InvalidArgument unless they are whole pages that no row from token `length` on sees, and the
  // layer has no other evicted tokens. REQUIRES: length(layer) < at <= length.
  absl::Status Skip(int64_t layer, int64_t at, int64_t length);

 private:
  friend class CacheStore;
  Draft(CacheStore& store, std::shared_ptr<Cache> cache)
      : store_(&store), cache_(std::move(cache)) {}

  CacheStore* store_;
  std::shared_ptr<Cache> cache_;
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_CACHE_STORE_H_
