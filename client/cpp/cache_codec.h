// Messages of CacheService.
#ifndef RAPT_CLIENT_CPP_CACHE_CODEC_H_
#define RAPT_CLIENT_CPP_CACHE_CODEC_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "client/cpp/request_message.h"
#include "proto/rapt/v1/cache.pb.h"
#include "rapt/cache.h"

namespace rapt::client {

v1::CreateRequest Encode(const CacheOptions& options);
v1::Ids EncodeIds(absl::Span<const std::string> ids);

// An item of a request, as its handle knows the cache.
struct KnownItem {
  std::string cache;
  uint64_t generation = 0;
  int64_t at = 0;
};

// The messages refer to the tensors. InvalidArgument, naming the field, if the data of a tensor
// does not match its shape; ResourceExhausted for a message of more than `max_bytes`. REQUIRES:
// `known` has one entry for each part or item.
absl::StatusOr<RequestMessage> EncodeAppend(absl::Span<const CacheTokens> parts,
                                            absl::Span<const KnownItem> known, int64_t max_bytes);
absl::StatusOr<RequestMessage> EncodeCachedAttend(absl::Span<const CacheItem> items,
                                                  absl::Span<const KnownItem> known,
                                                  const CacheAttendCall& call, int64_t max_bytes);

CacheStorage DecodeStorage(v1::Storage storage);
std::vector<LayerShape> DecodeShapes(
    const google::protobuf::RepeatedPtrField<v1::LayerShape>& shapes);

// Internal for a malformed response.
absl::StatusOr<CacheInfo> Decode(const v1::Cache& cache);
absl::StatusOr<FoundCaches> Decode(const v1::Caches& caches);
absl::StatusOr<CacheInfo> Decode(const v1::UpdateResult& result);
absl::StatusOr<std::vector<CacheItemResult>> Decode(size_t parts,
                                                    const v1::AppendResponse& response);
absl::StatusOr<CacheAttendResult> Decode(size_t items, const CacheAttendCall& call,
                                         v1::AttendCachedResponse response);

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_CACHE_CODEC_H_
