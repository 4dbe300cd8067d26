#include "client/cpp/cache_codec.h"

#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/wire_format.h"
#include "client/cpp/codec.h"
#include "client/cpp/reason.h"

namespace rapt::client {
namespace {

using AttendRequest = v1::AttendCachedRequest;

absl::Status AppendOptional(const char* name, int number, const std::optional<TensorView>& view,
                            RequestMessage& message) {
  return view ? AppendTensor(name, number, *view, message) : absl::OkStatus();
}

template <typename Fields>
void SetKnown(const KnownItem& known, Fields& fields) {
  fields.set_cache(known.cache);
  fields.set_at(known.at);
  fields.set_generation(known.generation);
}

void WriteAttributes(const CacheAttendCall& call, AttendRequest& request) {
  request.set_layer(call.layer);
  if (call.scale) request.set_scale(*call.scale);
  request.set_softcap(call.softcap);
  if (call.window.left) request.mutable_window()->set_left(*call.window.left);
  if (call.window.right) request.mutable_window()->set_right(*call.window.right);
  request.set_want_lse(call.wants_lse);
  if (call.output) request.set_output(ToProto(*call.output));
  if (!call.share_prefix) request.set_share_prefix(v1::SHARE_PREFIX_NEVER);
  request.set_return_partial_success(call.partial_success);
  request.set_priority(call.priority);
}

CacheItemResult Decode(const v1::ItemResult& item) {
  CacheItemResult result;
  result.status = absl::Status(static_cast<absl::StatusCode>(item.code()), item.message());
  SetReason(item.reason(), result.status);
  result.length = item.length();
  result.applied_before = item.applied_before();
  return result;
}

template <typename Items>
absl::StatusOr<std::vector<CacheItemResult>> DecodeItems(size_t wanted, const Items& items) {
  if (static_cast<size_t>(items.size()) != wanted) {
    return MalformedResponse(absl::StrCat(items.size(), " results of ", wanted));
  }
  std::vector<CacheItemResult> results;
  for (const v1::ItemResult& item : items) results.push_back(Decode(item));
  return results;
}

}  // namespace

v1::CreateRequest Encode(const CacheOptions& options) {
  v1::CreateRequest request;
  request.set_name(options.name);
  for (const LayerShape& shape : options.shapes) {
    v1::LayerShape& to = *request.add_shapes();
    to.set_layers(shape.layers);
    to.set_kv_heads(shape.kv_heads);
    to.set_head_size(shape.head_size);
    to.set_value_head_size(shape.value_head_size);
    to.set_keep_first(shape.keep_first);
    to.set_keep_last(shape.keep_last);
  }
  request.set_dtype(ToProto(options.dtype));
  request.set_storage(options.storage == CacheStorage::kInt8 ? v1::STORAGE_INT8
                                                             : v1::STORAGE_PLAIN);
  request.set_reserve_tokens(options.reserve_tokens);
  request.set_lease_ms(options.lease.count());
  request.set_first_position(options.first_position);
  return request;
}

v1::Ids EncodeIds(absl::Span<const std::string> ids) {
  v1::Ids message;
  for (const std::string& id : ids) message.add_caches(id);
  return message;
}

absl::StatusOr<RequestMessage> EncodeAppend(absl::Span<const CacheTokens> parts,
                                            absl::Span<const KnownItem> known, int64_t max_bytes) {
  RequestMessage message;
  for (size_t n = 0; n < parts.size(); ++n) {
    v1::AppendPart fields;
    fields.set_layer(parts[n].layer);
    SetKnown(known[n], fields);
    RequestMessage part;
    part.Append(fields.SerializeAsString());
    const std::string name = absl::StrCat("parts[", n, "].");
    RAPT_RETURN_IF_ERROR(AppendTensor(name + "k", v1::AppendPart::kKFieldNumber, parts[n].k, part));
    RAPT_RETURN_IF_ERROR(AppendTensor(name + "v", v1::AppendPart::kVFieldNumber, parts[n].v, part));
    std::string header;
    wire::AppendFieldHeader(v1::AppendRequest::kPartsFieldNumber, part.size(), header);
    message.Append(header);
    message.Append(part);
  }
  RAPT_RETURN_IF_ERROR(CheckSize(message.size(), max_bytes));
  return message;
}

absl::StatusOr<RequestMessage> EncodeCachedAttend(absl::Span<const CacheItem> items,
                                                  absl::Span<const KnownItem> known,
                                                  const CacheAttendCall& call, int64_t max_bytes) {
  AttendRequest fields;
  WriteAttributes(call, fields);
  for (size_t n = 0; n < items.size(); ++n) {
    v1::Item& item = *fields.add_items();
    SetKnown(known[n], item);
    item.set_rows(items[n].rows);
    item.set_new_tokens(items[n].new_tokens);
    if (items[n].position) item.set_position(*items[n].position);
  }
  RequestMessage message;
  message.Append(fields.SerializeAsString());
  RAPT_RETURN_IF_ERROR(AppendOptional("q", AttendRequest::kQFieldNumber, call.q, message));
  RAPT_RETURN_IF_ERROR(AppendOptional("k", AttendRequest::kKFieldNumber, call.k, message));
  RAPT_RETURN_IF_ERROR(AppendOptional("v", AttendRequest::kVFieldNumber, call.v, message));
  RAPT_RETURN_IF_ERROR(
      AppendOptional("head_sink", AttendRequest::kHeadSinkFieldNumber, call.head_sink, message));
  RAPT_RETURN_IF_ERROR(CheckSize(message.size(), max_bytes));
  return message;
}

CacheStorage DecodeStorage(v1::Storage storage) {
  return storage == v1::STORAGE_INT8 ? CacheStorage::kInt8 : CacheStorage::kPlain;
}

std::vector<LayerShape> DecodeShapes(
    const google::protobuf::RepeatedPtrField<v1::LayerShape>& shapes) {
  std::vector<LayerShape> decoded;
  for (const v1::LayerShape& shape : shapes) {
    decoded.push_back({.layers = shape.layers(),
                       .kv_heads = shape.kv_heads(),
                       .head_size = shape.head_size(),
                       .value_head_size = shape.value_head_size(),
                       .keep_first = shape.keep_first(),
                       .keep_last = shape.keep_last()});
  }
  return decoded;
}

absl::StatusOr<CacheInfo> Decode(const v1::Cache& cache) {
  RAPT_ASSIGN_OR_RETURN(const DType dtype, FromProto("a cache", cache.dtype()));
  return CacheInfo{.id = cache.id(),
                   .name = cache.name(),
                   .shapes = DecodeShapes(cache.shapes()),
                   .dtype = dtype,
                   .storage = DecodeStorage(cache.storage()),
                   .first_position = cache.first_position(),
                   .lengths = {cache.lengths().begin(), cache.lengths().end()},
                   .generation = cache.generation(),
                   .lease = std::chrono::milliseconds(cache.lease_ms()),
                   .expires_in = std::chrono::milliseconds(cache.expires_in_ms()),
                   .reserve_tokens = cache.reserve_tokens(),
                   .bytes = cache.bytes(),
                   .shared_bytes = cache.shared_bytes()};
}

absl::StatusOr<FoundCaches> Decode(const v1::Caches& caches) {
  FoundCaches found;
  for (const v1::Cache& cache : caches.caches()) {
    RAPT_ASSIGN_OR_RETURN(CacheInfo info, Decode(cache));
    found.caches.push_back(std::move(info));
  }
  for (const v1::Missing& missing : caches.missing()) {
    found.missing.push_back({missing.cache(), missing.reason()});
  }
  return found;
}

absl::StatusOr<CacheInfo> Decode(const v1::UpdateResult& result) {
  if (result.code() == 0) return Decode(result.cache());
  absl::Status status(static_cast<absl::StatusCode>(result.code()), result.message());
  SetReason(result.reason(), status);
  return status;
}

absl::StatusOr<std::vector<CacheItemResult>> Decode(size_t parts,
                                                    const v1::AppendResponse& response) {
  return DecodeItems(parts, response.results());
}

absl::StatusOr<CacheAttendResult> Decode(size_t items, const CacheAttendCall& call,
                                         v1::AttendCachedResponse response) {
  RAPT_ASSIGN_OR_RETURN(auto results, DecodeItems(items, response.items()));
  CacheAttendResult result;
  result.items = std::move(results);
  if (!response.has_y()) return MalformedResponse("no y");
  RAPT_ASSIGN_OR_RETURN(result.y, TakeTensor("y", *response.mutable_y()));
  if (call.wants_lse) {
    if (!response.has_lse()) return MalformedResponse("no lse");
    RAPT_ASSIGN_OR_RETURN(result.lse, TakeTensor("lse", *response.mutable_lse()));
  }
  ReadPlan(response, result);
  return result;
}

}  // namespace rapt::client
