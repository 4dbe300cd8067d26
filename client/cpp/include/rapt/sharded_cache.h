// A context whose keys and values are on several servers, because one has not enough memory for
// them or takes too long to read them.
//
//     absl::StatusOr<ShardedCache> context = CreateShardedCache(
//         {{.server = &a, .tokens = 65536}, {.server = &b}},
//         {.shapes = {{.layers = 32, .kv_heads = 8, .head_size = 128}}});
//     absl::Status stored = context->Append({{layer, k, v}});
//     absl::StatusOr<ShardedResult> step =
//         context->Attend({.layer = layer, .q = q, .k = new_k, .v = new_v});
//
// Each server holds a shard: contiguous tokens of the context, in a cache of its own. A call goes
// to all shards at once. Each answers with the attention to its tokens and with the lse of its
// rows, and the client merges these partial results: the result is that of one cache with all
// tokens, but for the rounding of FP32.
//
// Letters and tokens as in cache.h. This header depends on Abseil only.
#ifndef RAPT_CLIENT_RAPT_SHARDED_CACHE_H_
#define RAPT_CLIENT_RAPT_SHARDED_CACHE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "rapt/cache.h"
#include "rapt/cache_transfer.h"
#include "rapt/client.h"
#include "rapt/tensor.h"

namespace rapt::client {

// A server, and how many tokens it holds, after those of the shards before.
struct Shard {
  Client* server = nullptr;
  int64_t tokens = 0;  // at least 1; of the last shard also 0: all that follow
};

struct ShardedResult {
  Tensor y;    // [R, Hq, Dv], FP32; FP64 for caches of FP64
  Tensor lse;  // [R, Hq], natural logarithm, of the same type
};

// Windows (keep_first, keep_last), position and head_sink mean what they mean for one cache.
// However, only calls that append to a shard evict tokens: a shard that is full keeps its pages.
//
// Errors are those of Cache. Those of a shard name it: "shard 1, tokens 65536 to 131071, cache
// ID: ...". If several fail, the first one is returned. After an error the context is as long as
// before. Make the same call again: shards that have the new tokens compare them. To continue with
// others instead, call Truncate(lengths()[0]) first.
//
// If a server is lost, only its range has to be stored again: see Rebuild().
//
// Methods block until done. Not thread-safe. Move only. Each shard's lease is renewed while this
// object lives. The destructor closes the caches. REQUIRES: destroyed before the clients.
class ShardedCache {
 public:
  ~ShardedCache();
  ShardedCache(ShardedCache&& other) noexcept;
  ShardedCache& operator=(ShardedCache&& other) noexcept;

  // Tokens of each layer, from the first one to the first that is missing.
  std::vector<int64_t> lengths() const;

  size_t shards() const;
  // A shard's cache. REQUIRES: shard < shards().
  const Cache& cache(size_t shard) const;

  // Appends to the end of layers. Tokens that a shard has no room for go to the next one. No layer
  // twice. ResourceExhausted if the last shard is full.
  absl::Status Append(absl::Span<const CacheTokens> parts, const CallOptions& options = {});

  // Appends, then attends. Of `call`, partial_success and wants_lse are ignored, and output must be
  // absent or the result's type. FailedPrecondition while a shard lacks tokens.
  absl::StatusOr<ShardedResult> Attend(const CacheAttendCall& call,
                                       const CallOptions& options = {});

  // Every layer keeps its first `length` tokens. OutOfRange if one has fewer.
  absl::Status Truncate(int64_t length, const CallOptions& options = {});

  // Replaces a shard that is lost by an empty one on `server`. Append its tokens again by Fill().
  absl::Status Rebuild(size_t shard, Client& server, const CallOptions& options = {});
  // Replaces a shard by a copy: of an export, while its server drains, or of a file.
  // Of a layer that this object knew tokens of, or has sent some, the copy's further tokens do not
  // count: they may be those of a call that failed, which compares them when it is made again. Of
  // other layers all count.
  // InvalidArgument if `from` is not a cache of this shard's form and first position.
  absl::Status Rebuild(size_t shard, Client& server, CacheReader& from,
                       const CallOptions& options = {});

  // Appends to one shard, after the tokens that it has. Also stores the shards of a context that is
  // known, in any order. No layer twice. OutOfRange for more tokens than the shard holds.
  absl::Status Fill(size_t shard, absl::Span<const CacheTokens> parts,
                    const CallOptions& options = {});

 private:
  struct State;
  friend absl::StatusOr<ShardedCache> CreateShardedCache(absl::Span<const Shard> shards,
                                                         const CacheOptions& cache,
                                                         const CallOptions& options);
  explicit ShardedCache(std::unique_ptr<State> state);

  std::unique_ptr<State> state_;
};

// Makes a cache on each server: 1 to 256 shards, in the order of their tokens. `cache` is the whole
// context; its name, if it has one, gives those of the shards, NAME/0, NAME/1, ..., which are found
// again with what they hold. After an error, named caches stay until their leases end.
absl::StatusOr<ShardedCache> CreateShardedCache(absl::Span<const Shard> shards,
                                                const CacheOptions& cache,
                                                const CallOptions& options = {});

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_SHARDED_CACHE_H_
