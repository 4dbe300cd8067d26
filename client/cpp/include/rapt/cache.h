// Keys and values that stay with the server. A step sends only the rows of its new tokens.
//
//     absl::StatusOr<Cache> cache =
//         CreateCache(client, {.shapes = {{.layers = 32, .kv_heads = 8, .head_size = 128}},
//                              .dtype = DType::kBFloat16});
//     if (!cache.ok()) return cache.status();
//     absl::StatusOr<CacheItemResult> prompt = cache->Append(layer, k, v);
//     absl::StatusOr<CacheAttendResult> step =
//         cache->Attend({.layer = layer, .q = q, .k = new_k, .v = new_v});
//
// Letters in shapes: Hq query heads; Hkv key/value heads, Hq a multiple of Hkv; D head size of Q
// and K; Dv head size of V and Y; R query rows; n new tokens.
//
// Tokens of a layer are counted from 0. Token j is at position first_position + j. A row sees the
// tokens up to its own position, so attention is causal. Keys come after rotary embedding.
//
// A cache is in the memory of one server: the address of the client must name one server only. It
// is lost when its server ends, and when nothing renewed its lease in time.
//
// This header depends on Abseil only.
#ifndef RAPT_CLIENT_RAPT_CACHE_H_
#define RAPT_CLIENT_RAPT_CACHE_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "rapt/attend.h"
#include "rapt/client.h"
#include "rapt/reports.h"
#include "rapt/tensor.h"

namespace rapt::client {

// Errors, in addition to those of Client, have a reason that tells them apart:
// - NotFound: "unknown" (never was, or another caller's), "closed", "expired" (its lease ran out),
//   "restarted" (its server has started anew), "wrong_instance" (made by another server).
// - ResourceExhausted: "pages" (the server has too few free pages), "quota" (of the caller).
// - FailedPrecondition: "evicted" (a token that is needed was evicted). Without a reason: the
// handle
//   was closed, released or moved from.
// - Aborted: "conflict" (the layer has other tokens there), "generation" (it was truncated).
// - OutOfRange: the layer has fewer tokens.
// - AlreadyExists: a cache of that name exists and is not what was asked for.
// - Unavailable: "draining" (the server makes no new caches before it ends).
// - Unimplemented: the server holds no caches.
//
// Returns the reason of an error; empty if it has none.
std::string ReasonOf(const absl::Status& status);

// Layers of one form, following those of the shapes before. A cache has at most 1024 layers.
struct LayerShape {
  int32_t layers = 1;
  int64_t kv_heads = 0;
  int64_t head_size = 0;
  int64_t value_head_size = 0;  // 0: head_size
  // The tokens that a row sees: positions below keep_first, and the keep_last last ones. The server
  // evicts tokens that no later row sees. keep_last 0: all tokens stay.
  int64_t keep_first = 0;
  int64_t keep_last = 0;

  bool operator==(const LayerShape&) const = default;
};

// How a cache stores keys and values: as they come, or rounded to 8 bits, which is Storage of
// cache.proto.
enum class CacheStorage { kPlain, kInt8 };

struct CacheOptions {
  std::vector<LayerShape> shapes = {};
  DType dtype = DType::kFloat32;  // of q, k and v: a float type
  CacheStorage storage = CacheStorage::kPlain;
  // At most 256 bytes. The caller's live cache of this name, if it was made with the same shapes,
  // dtype, storage and first_position, is the result, with what it holds. Empty: the client draws a
  // name, so that a retry after a lost reply returns the cache that was made.
  std::string name = {};
  int64_t reserve_tokens = 0;  // of every layer: their pages are taken at once
  // How long the cache lives after a call that renewed it. 0: the server's default. The server
  // shortens longer ones than it allows.
  std::chrono::milliseconds lease{0};
  int64_t first_position = 0;
};

// A cache as the server described it.
struct CacheInfo {
  std::string id;
  std::string name;
  std::vector<LayerShape> shapes;
  DType dtype = DType::kFloat32;
  CacheStorage storage = CacheStorage::kPlain;
  int64_t first_position = 0;
  std::vector<int64_t> lengths;  // tokens of each layer, evicted ones counted
  uint64_t generation = 0;       // 1 in a new cache, and one more after each truncation
  std::chrono::milliseconds lease{0};
  std::chrono::milliseconds expires_in{0};
  int64_t reserve_tokens = 0;
  int64_t bytes = 0;  // of the pages it reaches, with those reserved
  // Of them, what other caches reach as well. In answers to Get and List; otherwise 0.
  int64_t shared_bytes = 0;
};

// New tokens of a layer.
struct CacheTokens {
  int32_t layer = 0;  // from 0
  TensorView k = {};  // [n, Hkv, D]
  TensorView v = {};  // [n, Hkv, Dv]
};

// One layer of one step: appends n tokens, then attends with R rows. R or n may be 0, not both.
// Absent tensors have no rows.
struct CacheAttendCall {
  int32_t layer = 0;                         // from 0
  std::optional<TensorView> q = {};          // [R, Hq, D]
  std::optional<TensorView> k = {};          // [n, Hkv, D]
  std::optional<TensorView> v = {};          // [n, Hkv, Dv]
  std::optional<TensorView> head_sink = {};  // [Hq], as in AttendCall
  // Of the first row, of Cache::Attend() alone. Absent: the last row sees the last token.
  std::optional<int64_t> position = {};
  std::optional<double> scale = {};  // absent: 1 / sqrt(D)
  double softcap = 0;
  Window window = {};
  bool wants_lse = false;
  std::optional<DType> output = {};  // of y: the cache's, or kFloat32; absent: the cache's
  // Caches that begin with the same pages may be read together. false: the bits of an item depend
  // on nothing but the item.
  bool share_prefix = true;
  // Of AttendCaches(): an error of one item fails that item alone. Its rows of y are zeros, its lse
  // -inf.
  bool partial_success = false;
  uint64_t priority = 0;  // as in AttendCall
};

// What a call did to a layer of a cache.
struct CacheItemResult {
  absl::Status status;          // an error only with partial_success
  int64_t length = 0;           // of the layer at the server, after the call
  bool applied_before = false;  // the tokens were there already
};

struct CacheAttendResult {
  Tensor y;                            // [rows, Hq, Dv]
  std::optional<Tensor> lse;           // [rows, Hq], natural logarithm; float, double for kFloat64
  std::vector<CacheItemResult> items;  // one for each cache

  // As in AttendResult.
  std::string backend;
  std::string plan;
  std::chrono::microseconds queue_time{0};
  std::chrono::microseconds compute_time{0};
};

struct ForkOptions {
  std::optional<int64_t> length = {};  // tokens of each layer; absent: those of the shortest one
  std::string name = {};               // as in CacheOptions; must name a fork at the same length
  int64_t reserve_tokens = 0;
  std::chrono::milliseconds lease{0};  // 0: as this cache
};

struct CacheItem;
struct CacheChanges;

// A handle of a cache. While it lives, its client renews the lease in the background, at a third of
// the lease after the last call that renewed it. Its destructor closes the cache: it waits at most
// a second, and a cache that could not be closed expires.
//
// The handle knows how many tokens each layer has, and says so with every call, so that the server
// never applies a call twice. Calls are retried as RetryPolicy says. After an error that leaves
// open whether the tokens were appended (DeadlineExceeded, Cancelled, Unavailable), make the same
// call again: the answer is the same whether they were or not. Refresh() tells.
//
// Methods block until done. Errors are those of Client, and those described above.
//
// Thread-safe, but only one call at a time may append to a layer, or truncate. Move only.
// REQUIRES: destroyed before its client. No method is called while the handle is moved, closed,
// released or destroyed.
class Cache {
 public:
  ~Cache();
  Cache(Cache&& other) noexcept;
  Cache& operator=(Cache&& other) noexcept;

  // REQUIRE: not closed, released or moved from. Abort otherwise.
  const std::string& id() const;
  const std::vector<LayerShape>& shapes() const;
  DType dtype() const;
  std::vector<int64_t> lengths() const;  // tokens of each layer that this handle knows of
  uint64_t generation() const;

  // Appends tokens to one layer, k [n, Hkv, D] and v [n, Hkv, Dv], or to several layers: all or
  // none. At most 1024 parts. No layer twice. Sends the tensors without copying them.
  absl::StatusOr<CacheItemResult> Append(int32_t layer, const TensorView& k, const TensorView& v,
                                         const CallOptions& options = {});
  absl::StatusOr<std::vector<CacheItemResult>> Append(absl::Span<const CacheTokens> parts,
                                                      const CallOptions& options = {});

  // Appends and attends. Sends the tensors without copying them.
  absl::StatusOr<CacheAttendResult> Attend(const CacheAttendCall& call,
                                           const CallOptions& options = {});

  // Explains an Attend() whose result looks wrong, as Client::Diagnose(): over the tokens that this
  // handle knows of, with the rows of q. Appends nothing, so k and v must be absent, and does not
  // renew the lease. FailedPrecondition, "evicted", if the layer has evicted tokens.
  absl::StatusOr<Diagnosis> Diagnose(const CacheAttendCall& call, const CallOptions& options = {});

  // Returns a cache of the first tokens of every layer, which shares their pages.
  absl::StatusOr<Cache> Fork(const ForkOptions& fork = {}, const CallOptions& options = {});

  // Every layer keeps its first `length` tokens. Calls sent before, and late, are then Aborted.
  absl::Status Truncate(int64_t length, const CallOptions& options = {});

  absl::StatusOr<CacheInfo> Renew(const CallOptions& options = {});

  // Returns what the server has, and takes over lengths and generation. Does not renew the lease.
  // REQUIRES: no other call runs.
  absl::StatusOr<CacheInfo> Refresh(const CallOptions& options = {});

  // Closes the cache now. OK if its owner closed it before. The handle is then empty, also after an
  // error.
  absl::Status Close(const CallOptions& options = {});

  // Gives the cache up without closing it, and returns its id. Nothing renews it any more.
  std::string Release();

 private:
  class State;
  friend Cache OwnCache(CacheCalls& calls, const CacheInfo& info,
                        std::chrono::steady_clock::time_point start);
  friend Cache BorrowCache(Client& client, const CacheInfo& known);
  friend absl::StatusOr<CacheAttendResult> AttendCaches(absl::Span<const CacheItem> items,
                                                        const CacheAttendCall& call,
                                                        const CallOptions& options);
  friend absl::StatusOr<std::vector<Cache>> UpdateCaches(const CacheChanges& changes,
                                                         const CallOptions& options);
  explicit Cache(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;  // null: closed, released or moved from
};

absl::StatusOr<Cache> CreateCache(Client& client, const CacheOptions& cache,
                                  const CallOptions& options = {});

// A handle that neither renews the cache nor closes it. Makes no call: `known` says what the cache
// is, as GetCaches() returned it.
Cache BorrowCache(Client& client, const CacheInfo& known);

// A cache's part of a batch: its `rows` rows of q and `new_tokens` rows of k and v, after those of
// the items before.
struct CacheItem {
  Cache* cache = nullptr;
  int32_t rows = 0;
  int32_t new_tokens = 0;
  std::optional<int64_t> position =
      {};  // of the first row; absent: the last row sees the last token
};

// A step of several caches: appends to one layer of each, then attends. All or nothing, unless
// call.partial_success is set. The caches must have the same client, and at this layer the same
// Hkv, D, Dv and dtype. At most 1024 items. No cache twice.
absl::StatusOr<CacheAttendResult> AttendCaches(absl::Span<const CacheItem> items,
                                               const CacheAttendCall& call,
                                               const CallOptions& options = {});

struct CacheTruncation {
  Cache* cache = nullptr;
  int64_t length = 0;
};

// Changes of several caches of one client: at least one, at most 1024. No cache twice in truncates
// or in closes.
struct CacheChanges {
  std::vector<Cache*> forks = {};  // as by Fork(); a cache may occur several times
  std::vector<CacheTruncation> truncates = {};
  std::vector<Cache*> closes = {};  // the handles are then empty
};

// Makes the changes in one call and in this order, as a step of beam search does, and returns the
// forks. After an error there are none; truncations may have been made, unless the server refused a
// fork. Nothing is closed if it refused a fork or a truncation.
absl::StatusOr<std::vector<Cache>> UpdateCaches(const CacheChanges& changes,
                                                const CallOptions& options = {});

struct MissingCache {
  std::string id;
  std::string reason;
};

// In the order of the ids. NotFound if none of them is found.
struct FoundCaches {
  std::vector<CacheInfo> caches;
  std::vector<MissingCache> missing;
};

// 1 to 1024 ids, none twice. Neither renews a lease. CloseCaches() returns what the caches were.
absl::StatusOr<FoundCaches> GetCaches(Client& client, absl::Span<const std::string> ids,
                                      const CallOptions& options = {});
absl::StatusOr<FoundCaches> CloseCaches(Client& client, absl::Span<const std::string> ids,
                                        const CallOptions& options = {});

// The caller's caches in the order of their making; those whose names begin with `name_prefix`.
absl::StatusOr<std::vector<CacheInfo>> ListCaches(Client& client,
                                                  const std::string& name_prefix = "",
                                                  const CallOptions& options = {});

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_CACHE_H_
