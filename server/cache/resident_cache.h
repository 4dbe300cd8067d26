// One cache: the tokens of its layers, and the memory that they take.
#ifndef RAPT_SERVER_CACHE_RESIDENT_CACHE_H_
#define RAPT_SERVER_CACHE_RESIDENT_CACHE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "attention/mechanism/softmax/ragged_attention.h"
#include "base/mutex.h"
#include "server/cache/arena.h"
#include "server/cache/cache_spec.h"
#include "server/cache/page_list.h"
#include "server/cache/reason.h"

namespace rapt::cache {

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

// New tokens: keys [count, Hkv, D] and values [count, Hkv, Dv], row-major, as they are stored.
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

// What the caches of one store share. Outlives them. Thread-safe.
struct CacheContext {
  Arena& arena;
  Refusals& refusals;
  // Sums over the caches. Pages count in each cache that reaches them.
  std::atomic<int64_t> reached_bytes{0};
  std::atomic<int64_t> reserved_bytes{0};  // of them, not yet written
};

// The memory of one caller's caches. Thread-safe.
class Account {
 public:
  // `limit` 0: none.
  Account(std::string owner, int64_t limit) : owner_(std::move(owner)), limit_(limit) {}

  const std::string& owner() const { return owner_; }
  int64_t limit() const { return limit_; }
  // Returns how many bytes more fit.
  int64_t left() const;
  // Adds bytes unless they exceed the limit.
  bool TryCharge(int64_t bytes);
  // Adds bytes, which may be negative.
  void Charge(int64_t bytes) { bytes_ += bytes; }

 private:
  const std::string owner_;
  const int64_t limit_;
  // Of pages, where one counts in each cache that reaches it, and of the tables of tokens that were
  // imported as evicted.
  std::atomic<int64_t> bytes_{0};
};

// Its statuses are those of CacheStore. Thread-safe, apart from what needs the lock.
class ResidentCache {
 public:
  // Makes a cache without tokens and without reserved pages. REQUIRES: the spec is valid.
  static absl::StatusOr<std::shared_ptr<ResidentCache>> Make(CacheContext& context,
                                                             std::shared_ptr<Account> account,
                                                             std::string id, CacheSpec spec);
  ~ResidentCache();
  ResidentCache(const ResidentCache&) = delete;
  ResidentCache& operator=(const ResidentCache&) = delete;

  const std::string& owner() const { return account_->owner(); }
  const std::string& id() const { return id_; }
  const CacheSpec& spec() const { return spec_; }
  const std::vector<LayerShape>& shapes() const { return shapes_; }  // of each layer
  // Returns whether a call for `other` may be answered with this cache of the same name.
  bool WasMadeAs(const ResidentCache& other) const;
  // Returns whether this cache was made of the first `length` tokens of that one, by default of any
  // number.
  bool IsFork(const std::string& of, std::optional<int64_t> length) const;
  // Returns the tokens of the shortest layer; nullopt if the cache has another generation.
  std::optional<int64_t> ShortestIn(uint64_t generation);

  // Charges the owner for the pages that the cache reaches, unless they are charged, and takes
  // those of reserve_tokens. Call before others see the cache.
  absl::Status TakeMemory();

  // Returns a cache with the first tokens, which shares their pages and has not taken memory.
  // `spec` has this cache's shapes and first position.
  absl::StatusOr<std::shared_ptr<ResidentCache>> Fork(std::string id, CacheSpec spec,
                                                      uint64_t generation,
                                                      std::optional<int64_t> length);
  absl::Status Truncate(int64_t length, uint64_t generation);
  absl::StatusOr<CacheSnapshot> Freeze(uint64_t generation);

  struct State {
    std::vector<int64_t> lengths;
    uint64_t generation = 1;
    int64_t bytes = 0;
    int64_t shared_bytes = 0;
  };
  // Counting shared bytes reads an entry for each page.
  State Look(bool counts_shared);

  // Checks everything but the tokens.
  LayerState Find(const LayerCall& call);

  // A layer's part of an append, between its check and the decision about the whole.
  struct Prepared {
    absl::Status status;
    int64_t length = 0;
    bool applied_before = false;
    int64_t reserved_pages = 0;  // before
  };
  // Checks the tokens and takes their pages. Either Append() or Cancel() follows if the status is
  // OK. REQUIRES, like these two: the lock is held.
  Prepared Prepare(const LayerCall& call, const NewTokens& tokens);
  AppendResult Append(const LayerCall& call, const NewTokens& tokens, const Prepared& prepared);
  void Cancel(const LayerCall& call, const Prepared& prepared);

  // Of a cache that others do not see.
  int64_t length(int64_t layer) const { return layers_[static_cast<size_t>(layer)].length(); }
  absl::Status Fill(int64_t layer, int64_t count, const std::byte* keys, const std::byte* values);
  absl::Status Skip(int64_t layer, int64_t at, int64_t length);

  // Holds the locks of several caches; null ones are skipped.
  class Locks;

 private:
  // Of the record of a cache and of one layer, without pages.
  static constexpr int64_t kRecordBytes = 2048;
  static constexpr int64_t kLayerBytes = 256;

  ResidentCache(CacheContext& context, std::shared_ptr<Account> account, std::string id,
                CacheSpec spec, Arena::Charge record);

  struct Memory {
    int64_t bytes;
    int64_t reserved;
  };
  static Memory MemoryOf(const PageList& list) { return {list.bytes(), list.reserved_bytes()}; }
  // Charges the owner for what a change of the layer has taken.
  void Settle(const Memory& before, const PageList& list);
  // Refuse what exceeds the owner's quota.
  absl::Status ChargeOwner(int64_t bytes) const;
  absl::Status ChargePages(int64_t bytes);
  void AddCharged(int64_t bytes);
  absl::Status Reserve(PageList& list, int64_t count);
  absl::Status Fail(Reason reason, absl::StatusCode code, absl::string_view message) const {
    return context_.refusals.Fail(reason, code, message);
  }
  PageList& ListOf(const LayerCall& call) { return layers_[static_cast<size_t>(call.layer)]; }
  int64_t Shortest() const;
  absl::Status CheckGeneration(uint64_t generation) const;
  absl::Status CheckCut(int64_t length) const;
  absl::Status CheckPlace(const LayerCall& call, LayerState& state) const;
  absl::Status CheckTokens(const LayerCall& call, const NewTokens& tokens, Prepared& prepared);
  absl::Status TruncateLayers(int64_t length);
  void Evict(const LayerCall& call, const NewTokens& tokens, PageList& list) const;

  CacheContext& context_;
  const std::shared_ptr<Account> account_;
  const std::string id_;
  const CacheSpec spec_;
  std::vector<LayerShape> shapes_;  // constant, as what follows, once made
  std::string forked_from_;
  int64_t forked_length_ = 0;
  const Arena::Charge record_;

  Mutex mutex_;  // guards what follows; of several caches, locked in the order of their addresses
  std::vector<PageList> layers_;
  uint64_t generation_ = 1;
  int64_t charged_ = 0;                  // of pages
  int64_t charged_tables_ = 0;           // of tokens that were imported as evicted
  std::optional<int64_t> truncated_to_;  // by the last Truncate(), while nothing was appended since
};

class ResidentCache::Locks {
 public:
  explicit Locks(absl::Span<const std::shared_ptr<ResidentCache>> caches);
  ~Locks();
  Locks(const Locks&) = delete;
  Locks& operator=(const Locks&) = delete;

 private:
  std::vector<ResidentCache*> caches_;
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_RESIDENT_CACHE_H_
