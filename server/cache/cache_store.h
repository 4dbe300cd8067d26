// The caches of all callers, as the calls of an interface see them.
#ifndef RAPT_SERVER_CACHE_CACHE_STORE_H_
#define RAPT_SERVER_CACHE_CACHE_STORE_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/metric_sink.h"
#include "server/cache/arena.h"
#include "server/cache/cache_directory.h"
#include "server/cache/cache_spec.h"
#include "server/cache/reason.h"
#include "server/cache/resident_cache.h"

namespace rapt::cache {

// The state of a cache at one time.
struct CacheInfo {
  std::string id;
  CacheSpec spec;                // the lease as it is
  std::vector<int64_t> lengths;  // of each layer
  uint64_t generation = 1;
  std::chrono::nanoseconds expires_in{0};
  int64_t bytes = 0;  // of the pages that it reaches, with those reserved
  // Of them, what other caches or running calls reach as well. Counted by Get() and List() alone,
  // as it takes a look at each page; otherwise 0.
  int64_t shared_bytes = 0;
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
  static constexpr int64_t kMaxListed = 1000;

  CacheStore(Options options, Arena& arena, const Clock& clock);
  // Replaces Options::instance. REQUIRES: no other method has been called.
  void SetInstance(const std::string& instance) { directory_.SetInstance(instance); }
  CacheStore(const CacheStore&) = delete;
  CacheStore& operator=(const CacheStore&) = delete;

  // Returns the caller's cache of that name if it was made with the same shapes and first position,
  // ALREADY_EXISTS if with others, else a new cache.
  absl::StatusOr<CacheInfo> Create(const std::string& owner, const CacheSpec& spec);
  // Makes a cache with the first tokens of another one, whose pages it shares. Idempotent by name,
  // also when the other one has been truncated or closed since; ALREADY_EXISTS if the spec has no
  // length and the other one has grown instead.
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
  bool Has(const std::string& owner, const std::string& id) const {
    return directory_.Has(owner, id);
  }

  // The caches of one call, found when it came. They stay until it has ended, closed or not. The
  // store outlives it.
  class Batch;
  // What a call does to the leases of its caches.
  enum class Leases : uint8_t { kRenewed, kKept };
  // Finds the layers of a call and checks what can be checked without their tokens: a state for
  // each, whose status may be an error. InvalidArgument for a layer that occurs twice. Errors name
  // a layer's place in `field`: "parts[2]: ".
  absl::StatusOr<Batch> Open(const std::string& owner, absl::Span<const LayerCall> calls,
                             std::string field = "parts", Leases leases = Leases::kRenewed);

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
  // Makes the draft a cache. ALREADY_EXISTS as above; otherwise the statuses of Create(), and
  // nothing is left.
  absl::StatusOr<CacheInfo> Publish(Draft draft);

  // From now on Create(), Fork() and all methods of drafts are UNAVAILABLE.
  void StopCreating() { creating_ = false; }

  // Ends the caches whose lease has run out. Returns when the next one will; max() without caches.
  Instant Expire() { return directory_.Expire(); }

  int64_t caches() const { return directory_.size(); }
  // Returns how often calls have used a cache so far.
  int64_t uses() const { return directory_.finds(); }
  const Options& options() const { return options_; }
  const Arena& arena() const { return context_.arena; }

  // Returns a status that carries the reason, and counts it.
  absl::Status Fail(Reason reason, absl::StatusCode code, absl::string_view message) {
    return refusals_.Fail(reason, code, message);
  }

  // Counts bytes of keys and values that a call reads, and those that it does not read again
  // because items share them.
  void CountRead(int64_t read, int64_t saved) {
    read_bytes_ += read;
    saved_bytes_ += saved;
  }

  // Exports rapt_kv_limit_bytes and its siblings.
  void ExportTo(MetricSink& metrics);

 private:
  using Handle = CacheDirectory::Handle;
  using Named = absl::StatusOr<std::optional<CacheInfo>>;

  absl::Status CheckCreating() const;
  absl::StatusOr<std::chrono::nanoseconds> LeaseOf(std::chrono::nanoseconds wanted,
                                                   std::chrono::nanoseconds otherwise) const;
  // Checks the arguments of Create() and makes a cache that is not visible.
  absl::StatusOr<std::shared_ptr<ResidentCache>> NewCache(const std::string& owner,
                                                          const CacheSpec& spec);
  // Returns the live cache of the name of `wanted`; AlreadyExists if it was made as another.
  Named FindNamed(const ResidentCache& wanted);
  // Returns the live cache of that name, or takes the memory of this one and makes it visible.
  absl::StatusOr<CacheInfo> FindOrAdd(const std::shared_ptr<ResidentCache>& cache);
  // Returns nullopt if the owner has a live cache of its name.
  Named Add(const std::shared_ptr<ResidentCache>& cache);
  CacheInfo InfoOf(const Handle& handle, bool counts_shared = false) const;
  enum class Action : uint8_t { kGet, kRenew, kClose };
  absl::StatusOr<CacheList> ForEach(const std::string& owner, absl::Span<const std::string> ids,
                                    Action action);

  const Options options_;
  const Clock& clock_;
  mutable Refusals refusals_;
  CacheContext context_;
  CacheDirectory directory_;
  std::atomic<bool> creating_{true};
  std::atomic<int64_t> read_bytes_{0};
  std::atomic<int64_t> saved_bytes_{0};
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
  std::vector<std::shared_ptr<ResidentCache>> caches_;  // null: not found
};

// Movable; not thread-safe. The store outlives it.
class CacheStore::Draft {
 public:
  // Of each layer.
  absl::Span<const LayerShape> shapes() const { return cache_->shapes(); }
  // Returns the tokens of a layer so far, evicted ones counted. REQUIRES: the layer exists.
  int64_t length(int64_t layer) const { return cache_->length(layer); }

  // Appends tokens: keys [count, Hkv, D] and values [count, Hkv, Dv], as they are stored.
  // RESOURCE_EXHAUSTED as CacheStore::Append().
  absl::Status Append(int64_t layer, int64_t count, const std::byte* keys, const std::byte* values);
  // Adds evicted tokens up to token `at` of a layer that will have `length` tokens.
  // InvalidArgument unless they are whole pages that no row from token `length` on sees, and the
  // layer has no other evicted tokens. REQUIRES: length(layer) < at <= length.
  absl::Status Skip(int64_t layer, int64_t at, int64_t length);

 private:
  friend class CacheStore;
  Draft(CacheStore& store, std::shared_ptr<ResidentCache> cache)
      : store_(&store), cache_(std::move(cache)) {}

  CacheStore* store_;
  std::shared_ptr<ResidentCache> cache_;
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_CACHE_STORE_H_
