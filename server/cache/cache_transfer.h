// A cache as a sequence of parts, which another server makes a cache of again.
#ifndef RAPT_SERVER_CACHE_CACHE_TRANSFER_H_
#define RAPT_SERVER_CACHE_CACHE_TRANSFER_H_

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "server/cache/cache_store.h"
#include "server/request.h"

namespace rapt::cache {

// The parts in their order: a header, any number of tokens, an end.
struct KvHeader {
  CacheSpec cache = {};
  std::vector<int64_t> lengths = {};  // of each layer, evicted tokens counted
};
// Tokens `at` to at + count of a layer: keys [count, Hkv, D] and values [count, Hkv, Dv],
// row-major.
struct KvTokens {
  int64_t layer = 0;
  int64_t at = 0;
  int64_t count = 0;
  InputBytes keys = {};
  InputBytes values = {};
};
struct KvEnd {
  int64_t chunks = 0;  // the number of KvTokens
};
using KvPart = std::variant<KvHeader, KvTokens, KvEnd>;

// The parts of a cache. A layer's tokens come in their order, without those that are evicted.
// Thread-compatible.
class Exporter {
 public:
  // A chunk has at most `chunk_tokens` tokens, 0: as many as make 1 MiB, and at most
  // `max_chunk_bytes`, unless one token has more. REQUIRES: chunk_tokens >= 0.
  Exporter(CacheSnapshot cache, int64_t chunk_tokens, int64_t max_chunk_bytes);

  KvHeader header() const;

  struct Chunk {
    int64_t layer = 0;
    int64_t at = 0;
    int64_t count = 0;
    int64_t key_bytes = 0;
    int64_t value_bytes = 0;
  };
  // Returns the next chunk, nullopt after the last one.
  std::optional<Chunk> Next();
  // Copies its tokens.
  void Copy(const Chunk& chunk, std::byte* keys, std::byte* values) const;

  // Returns the number of chunks that Next() has returned.
  int64_t chunks() const { return chunks_; }
  // Returns the bytes of keys and values of the largest chunk that may come.
  int64_t largest_chunk_bytes() const;

 private:
  int64_t TokensOfChunk(const TokenShape& token) const;

  const CacheSnapshot cache_;
  const int64_t chunk_tokens_;
  const int64_t max_chunk_bytes_;
  int64_t layer_ = 0;
  int64_t at_ = 0;
  int64_t chunks_ = 0;
};

// Makes a cache of its parts. Nobody sees it before Finish(). Destruction before that returns all
// memory.
//
// InvalidArgument says which part is wrong, and why; otherwise the statuses of
// CacheStore::StartDraft(), Draft::Append() and Publish(). No part may follow an error. Not
// thread-safe. The store outlives it.
class Importer {
 public:
  Importer(CacheStore& store, std::string owner) : store_(store), owner_(std::move(owner)) {}

  // Returns the bytes of workspace that Take() needs.
  static int64_t WorkspaceBytes(const KvPart& part);
  absl::Status Take(const KvPart& part, absl::Span<std::byte> workspace);
  // Call after the last part.
  absl::StatusOr<CacheInfo> Finish();

 private:
  absl::Status TakePart(const KvHeader& header, absl::Span<std::byte> workspace);
  absl::Status TakePart(const KvTokens& tokens, absl::Span<std::byte> workspace);
  absl::Status TakePart(const KvEnd& end, absl::Span<std::byte> workspace);
  absl::Status CheckTokens(const KvTokens& tokens) const;

  CacheStore& store_;
  const std::string owner_;
  std::optional<CacheStore::Draft> draft_;  // since the header
  std::vector<int64_t> lengths_;
  int64_t chunks_ = 0;
  bool has_ended_ = false;
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_CACHE_TRANSFER_H_
