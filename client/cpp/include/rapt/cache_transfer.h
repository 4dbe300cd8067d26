// Moves caches between servers, and keeps them in files: a chunk of tokens at a time, so that the
// client's memory does not grow with the cache.
//
//     // To another server:
//     absl::StatusOr<Cache> moved =
//         ImportCache(other, *ExportCache(client, {.id = id, .generation = generation}));
//     // To a file, and from there to a server:
//     absl::Status saved = WriteCacheFile(*ExportCache(client, {id, generation}), "chat.kvcache");
//     absl::StatusOr<Cache> cache = ImportCache(client, *ReadCacheFile("chat.kvcache"));
//
// Letters as in cache.h. This header depends on Abseil only.
#ifndef RAPT_CLIENT_RAPT_CACHE_TRANSFER_H_
#define RAPT_CLIENT_RAPT_CACHE_TRANSFER_H_

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "rapt/cache.h"
#include "rapt/client.h"
#include "rapt/tensor.h"

namespace rapt::client {

// What a cache is, before its tokens.
struct CacheHeader {
  CacheOptions cache;            // as it was made
  std::vector<int64_t> lengths;  // tokens of each layer, evicted ones counted
};

// Tokens `at` to at + n of a layer, as they are stored. With CacheStorage::kInt8, k and v are
// kUint8 and their last axis is the bytes of a row: D + 2 * ceil(D / 32), as cache.proto says.
struct CacheChunk {
  int32_t layer = 0;  // from 0
  int64_t at = 0;
  Tensor k;  // [n, Hkv, D]
  Tensor v;  // [n, Hkv, Dv]
};

// The contents of a cache, from a server or a file. Chunks of one layer come in the order of their
// tokens, without those that are evicted. Not thread-safe.
class CacheReader {
 public:
  virtual ~CacheReader() = default;

  // Begins to read, or begins again.
  virtual absl::StatusOr<CacheHeader> Begin() = 0;

  // Returns the next chunk, nullopt after the last one, once it is sure that all have come.
  // REQUIRES: Begin() was OK. No call after an error or nullopt, except Begin().
  virtual absl::StatusOr<std::optional<CacheChunk>> Next() = 0;
};

struct ExportOptions {
  std::string id = {};
  uint64_t generation = 0;   // of the cache; another one is Aborted, "generation"
  int64_t chunk_tokens = 0;  // tokens of a chunk, at most. 0: as many as make 1 MiB
};

// A cache of a server. Begin() takes a snapshot, which later calls on the cache do not affect, and
// does not renew the lease. It is retried as RetryPolicy says. Errors are those of Client and of
// cache.h. The timeout covers everything from here on. REQUIRES: destroyed before its client.
std::unique_ptr<CacheReader> ExportCache(Client& client, const ExportOptions& cache,
                                         const CallOptions& options = {});

struct ImportOptions {
  std::string name = {};  // empty: as it was, or one that the client draws if it had none
  std::optional<std::chrono::milliseconds> lease = {};  // absent: as it was
};

// Makes a cache of the contents of another one. It exists once everything has come and was right.
// Its rows get the same bits, and its generation is 1. Blocks until done; the timeout covers
// everything.
//
// Retried as RetryPolicy says, from the beginning. If a reply is lost, the cache that was made is
// found by its name: a cache of the form and the lengths of `from` whose lease does not begin
// before this call. Only if the caller had such a cache of that name before, never truncated, and
// renewed its lease during this call, that one may be taken for it. An error of `from` is final.
// AlreadyExists if the caller has a cache of that name. InvalidArgument says which chunk is wrong.
// After DeadlineExceeded, Cancelled and Unavailable the cache may be there; nobody renews it then.
absl::StatusOr<Cache> ImportCache(Client& client, CacheReader& from,
                                  const ImportOptions& import = {},
                                  const CallOptions& options = {});

// Writes a cache to a file: the messages of rapt.v1.CacheService.Export, each after its size as a
// varint. That is the delimited format that the libraries of Protocol Buffers read and write. The
// file is complete or not there: a temporary one, `path`.part, gets the name at the end, once it is
// on the disk. A pipe or a device is written directly. Errors are those of `from`; InvalidArgument,
// with the path, if the file can't be written.
absl::Status WriteCacheFile(CacheReader& from, const std::string& path);

// A cache in a file. InvalidArgument, with the path, if it can't be read or is not complete.
std::unique_ptr<CacheReader> ReadCacheFile(std::string path);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_RAPT_CACHE_TRANSFER_H_
