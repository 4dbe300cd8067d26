// Converts the messages of rapt.v1.CacheService to calls on caches and back.
#ifndef RAPT_SERVER_PROTOCOLS_RAPT_CACHE_CODEC_H_
#define RAPT_SERVER_PROTOCOLS_RAPT_CACHE_CODEC_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/container/inlined_vector.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "base/wire_format.h"
#include "proto/rapt/v1/cache.pb.h"
#include "server/cache/cache_store.h"
#include "server/cache/cache_transfer.h"
#include "server/cache/cached_attention.h"
#include "server/cache/cached_diagnosis.h"
#include "server/protocols/message_parts.h"
#include "server/request.h"

namespace rapt::native {

// The fields of AttendCachedRequest, AppendRequest and KvChunk that hold tensor data.
const wire::MessageSchema& AttendCachedSchema();
const wire::MessageSchema& AppendSchema();
const wire::MessageSchema& KvChunkSchema();

struct DecodedAttend {
  cache::AttendCall call;
  uint64_t priority = 0;
};
struct DecodedAppend {
  std::vector<cache::AppendPart> parts;
  bool partial = false;
  uint64_t priority = 0;
};

// A message of Import.
struct DecodedKvChunk {
  cache::KvPart part;
  std::optional<uint32_t> crc32 = std::nullopt;  // of tokens, as it came
};

// Decode a message, which outlives the call. InvalidArgument names the field, what came and what is
// allowed.
absl::StatusOr<DecodedAttend> DecodeAttendCached(const MessageBytes& message);
absl::StatusOr<DecodedAppend> DecodeAppend(const MessageBytes& message);
absl::StatusOr<DecodedKvChunk> DecodeKvChunk(const MessageBytes& message);
absl::StatusOr<v1::ExportRequest> DecodeExport(const MessageBytes& message);

// Returns KvTokens.crc32, which takes as long as the tokens are many.
uint32_t ChecksumOf(const cache::KvTokens& tokens);
// InvalidArgument if tokens do not have the checksum that came with them. That of the other parts
// is checked when they are decoded.
absl::Status CheckChecksum(const DecodedKvChunk& chunk);

// Encode the responses. REQUIRES: result.status is OK.
ResponseMessage EncodeAttendCached(const TensorOperator& op,
                                   absl::Span<const cache::AppendResult> items,
                                   const Result& result);
ResponseMessage EncodeAppend(absl::Span<const cache::AppendResult> parts);
// REQUIRES: the diagnosis' request has succeeded.
ResponseMessage EncodeDiagnosis(cache::CachedDiagnosis& diagnosis, const PlanOptions& options);

// The bytes of a KvTokens beside those of keys and values, at most.
inline constexpr int64_t kMaxKvFieldBytes = 128;

// Encode the parts of a cache.
ResponseMessage EncodeKvHeader(const cache::KvHeader& header);
ResponseMessage EncodeKvTokens(const cache::Exporter::Chunk& chunk, uint32_t crc32,
                               const OutputBuffer& keys, const OutputBuffer& values);
ResponseMessage EncodeKvEnd(const cache::KvEnd& end);

absl::StatusOr<cache::CacheSpec> DecodeCreate(const v1::CreateRequest& request);
cache::ForkSpec DecodeFork(const v1::ForkRequest& request);
void Encode(const cache::CacheInfo& info, v1::Cache& cache);
ResponseMessage EncodeCache(const cache::CacheInfo& info);
void Encode(const cache::CacheList& list, v1::Caches& caches);
// Without the shapes, which the caller knows.
void Encode(const absl::StatusOr<cache::CacheInfo>& info, v1::UpdateResult& result);

// Checks the number and the size of the ids, and that none occurs twice.
absl::StatusOr<std::vector<std::string>> DecodeIds(const v1::Ids& ids);

// Checks the number of entries, and that no cache is truncated or closed twice.
absl::Status CheckUpdate(const v1::UpdateRequest& request);

}  // namespace rapt::native

#endif  // RAPT_SERVER_PROTOCOLS_RAPT_CACHE_CODEC_H_
