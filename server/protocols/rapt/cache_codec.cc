#include "server/protocols/rapt/cache_codec.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <iterator>
#include <limits>
#include <optional>
#include <utility>
#include <variant>

#include "absl/container/flat_hash_set.h"
#include "absl/container/inlined_vector.h"
#include "absl/strings/str_cat.h"
#include "base/crc32.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "server/cache/limits.h"
#include "server/protocols/bounds.h"
#include "server/protocols/rapt/codec.h"
#include "server/protocols/rapt/reports.h"
#include "server/protocols/response_size.h"

namespace rapt::native {
namespace {

using AttendMessage = v1::AttendCachedRequest;
using AttendResponse = v1::AttendCachedResponse;

constexpr size_t kMaxIds = 1024;

// Items and parts name caches, and their number is limited.
constexpr wire::SplitLimits kAttendLimits = {.rest_bytes = 256 * 1024, .payloads = 64};
constexpr wire::SplitLimits kAppendLimits = {.rest_bytes = 256 * 1024,
                                             .payloads = 2 * cache::kMaxItems};

// A header names up to 1024 shapes, and as many lengths.
constexpr wire::SplitLimits kKvChunkLimits = {.rest_bytes = 128 * 1024, .payloads = 4};

absl::Status ReadCallTensor(Role role, const v1::Tensor& tensor, cache::CallTensor& out) {
  RAPT_ASSIGN_OR_RETURN(out.spec, ReadTensor(TensorFieldOf(role, out.name), tensor,
                                             /*shared_tensors=*/nullptr, out.bytes));
  return absl::OkStatus();
}

// The bytes of an id that is longer than any are of no use, so they are not kept.
std::string ReadId(const std::string& id) { return id.substr(0, cache::kMaxIdBytes + 1); }

cache::AttendItem ReadItem(const v1::Item& item, int64_t layer) {
  cache::AttendItem read;
  read.call.cache = ReadId(item.cache());
  read.call.layer = layer;
  read.call.generation = item.generation();
  if (item.has_at()) read.call.at = item.at();
  read.call.count = item.new_tokens();
  read.rows = item.rows();
  if (item.has_position()) read.position = item.position();
  return read;
}

absl::Status ReadOutput(v1::DataType code, std::optional<DType>& out) {
  if (code == v1::DATA_TYPE_UNSPECIFIED) return absl::OkStatus();
  out = ToDType(code);
  if (out && IsFloat(*out)) return absl::OkStatus();
  return Invalid("output is ", NameOf(code), "; it must be FP32 or the caches' type");
}

absl::Status ReadWindow(const v1::Window& window, cache::AttendCall& call) {
  if (window.has_left()) call.left_window = window.left();
  // Rows see no later tokens anyway.
  if (!window.has_right() || window.right() >= 0) return absl::OkStatus();
  return Invalid("window.right is ", window.right(), "; it must be at least 0, or absent");
}

absl::Status ReadAttributes(const AttendMessage& fields, cache::AttendCall& call) {
  if (static_cast<size_t>(fields.items_size()) > cache::kMaxItems) {
    return Invalid("items has ", fields.items_size(), " entries; at most ", cache::kMaxItems,
                   " are allowed");
  }
  if (!v1::SharePrefix_IsValid(fields.share_prefix())) {
    return UnknownValue("share_prefix", fields.share_prefix(),
                        "SHARE_PREFIX_AUTO (0) or SHARE_PREFIX_NEVER (1)");
  }
  for (const v1::Item& item : fields.items()) call.items.push_back(ReadItem(item, fields.layer()));
  if (fields.has_scale()) call.scale = fields.scale();
  call.softcap = fields.softcap();
  call.wants_lse = fields.want_lse();
  call.shares_prefixes = fields.share_prefix() == v1::SHARE_PREFIX_AUTO;
  call.partial = fields.return_partial_success();
  absl::Status status = ReadWindow(fields.window(), call);
  status.Update(ReadOutput(fields.output(), call.output));
  return status;
}

struct InputField {
  int number;
  Role role;
  cache::CallTensor cache::AttendCall::*tensor;
  bool (AttendMessage::*has)() const;
  const v1::Tensor& (AttendMessage::*get)() const;
};
constexpr InputField kAttendInputs[] = {
    {AttendMessage::kQFieldNumber, Role::kQ, &cache::AttendCall::q, &AttendMessage::has_q,
     &AttendMessage::q},
    {AttendMessage::kKFieldNumber, Role::kK, &cache::AttendCall::k, &AttendMessage::has_k,
     &AttendMessage::k},
    {AttendMessage::kVFieldNumber, Role::kV, &cache::AttendCall::v, &AttendMessage::has_v,
     &AttendMessage::v},
    {AttendMessage::kHeadSinkFieldNumber, Role::kHeadSink, &cache::AttendCall::head_sink,
     &AttendMessage::has_head_sink, &AttendMessage::head_sink},
};

// ItemResult and UpdateResult have the same fields for it.
template <typename ProtoResult>
void WriteStatus(const absl::Status& from, ProtoResult& to) {
  to.set_code(static_cast<int>(from.code()));
  to.set_message(std::string(from.message()));
  to.set_reason(std::string(NameOf(cache::ReasonOf(from))));
}

void WriteResult(const cache::AppendResult& from, v1::ItemResult& to) {
  WriteStatus(from.status, to);
  to.set_length(from.length);
  to.set_applied_before(from.applied_before);
}

std::chrono::nanoseconds FromMilliseconds(int64_t ms) {
  // A lease is cut to the longest allowed, which is far below.
  constexpr int64_t kMost = std::chrono::milliseconds(std::chrono::hours(24 * 365)).count();
  return std::chrono::milliseconds(std::min(ms, kMost));
}

void WriteShape(const cache::LayerShape& from, v1::LayerShape& to) {
  to.set_layers(static_cast<int32_t>(from.layers));
  to.set_kv_heads(from.token.kv_heads);
  to.set_head_size(from.token.head_size);
  to.set_value_head_size(from.token.value_head_size);
  to.set_keep_first(from.keep_first);
  to.set_keep_last(from.keep_last);
}

v1::Storage StorageOf(const cache::CacheSpec& spec) {
  return spec.shapes.front().token.q8_0 ? v1::STORAGE_INT8 : v1::STORAGE_PLAIN;
}

void WriteCreate(const cache::CacheSpec& from, v1::CreateRequest& to) {
  to.set_name(from.name);
  for (const cache::LayerShape& shape : from.shapes) WriteShape(shape, *to.add_shapes());
  to.set_dtype(CodeOf(from.shapes.front().token.dtype));
  to.set_storage(StorageOf(from));
  to.set_reserve_tokens(from.reserve_tokens);
  to.set_lease_ms(Milliseconds(from.lease));
  to.set_first_position(from.first_position);
}

// Returns the checksum that came with a part.
template <typename Part>
std::optional<uint32_t> ChecksumIn(const Part& part) {
  return part.has_crc32() ? std::optional(part.crc32()) : std::nullopt;
}

// Returns the checksum of a header or an end.
template <typename Part>
uint32_t ChecksumOfPart(Part part) {
  part.clear_crc32();
  return Crc32(part.SerializeAsString());
}

absl::Status CheckChecksum(absl::string_view part, std::optional<uint32_t> came,
                           uint32_t computed) {
  if (came == computed) return absl::OkStatus();
  if (!came) {
    return Invalid(part,
                   ".crc32 is missing; it must be the checksum of the part, as "
                   "KvChunk in cache.proto defines it");
  }
  return Invalid(part, ".crc32 is ", absl::Hex(*came, absl::kZeroPad8), "; what came has ",
                 absl::Hex(computed, absl::kZeroPad8),
                 ": it was damaged, or changed without a new checksum");
}

// The fields of tokens before k.
std::string FieldsBeforeKeys(int64_t layer, int64_t at, int64_t count) {
  v1::KvTokens fields;
  fields.set_layer(static_cast<int32_t>(layer));
  fields.set_at(at);
  fields.set_tokens(count);
  return fields.SerializeAsString();
}

uint32_t Crc32OfField(int number, const InputBytes& bytes, uint32_t crc) {
  if (bytes.size == 0) return crc;
  std::string header;
  wire::AppendFieldHeader(number, bytes.size, header);
  crc = Crc32(header, crc);
  std::array<std::byte, 16384> block;
  for (int64_t begin = 0; begin < bytes.size; begin += std::ssize(block)) {
    const int64_t count = std::min<int64_t>(std::ssize(block), bytes.size - begin);
    bytes.Copy(begin, count, block.data());
    crc = Crc32(absl::MakeConstSpan(block.data(), static_cast<size_t>(count)), crc);
  }
  return crc;
}

absl::StatusOr<DecodedKvChunk> ReadEnd(const v1::KvEnd& end) {
  RAPT_RETURN_IF_ERROR(CheckChecksum("end", ChecksumIn(end), ChecksumOfPart(end)));
  return DecodedKvChunk{cache::KvEnd{.chunks = end.chunks()}};
}

absl::StatusOr<DecodedKvChunk> ReadHeader(const v1::KvHeader& header) {
  RAPT_RETURN_IF_ERROR(CheckChecksum("header", ChecksumIn(header), ChecksumOfPart(header)));
  absl::StatusOr<cache::CacheSpec> spec = DecodeCreate(header.cache());
  if (!spec.ok()) {
    return Invalid("header.cache.", std::string(spec.status().message()));
  }
  return DecodedKvChunk{cache::KvHeader{
      .cache = *std::move(spec), .lengths = {header.lengths().begin(), header.lengths().end()}}};
}

}  // namespace

const wire::MessageSchema& AttendCachedSchema() {
  static const auto* const kFields = [] {
    auto* fields = new std::vector<wire::PayloadField>;
    for (const InputField& field : kAttendInputs) {
      fields->push_back({field.number, &TensorDataSchema()});
    }
    return fields;
  }();
  static const wire::MessageSchema kSchema = {*kFields};
  return kSchema;
}

const wire::MessageSchema& AppendSchema() {
  static const auto* const kPartFields =
      new std::vector<wire::PayloadField>{{v1::AppendPart::kKFieldNumber, &TensorDataSchema()},
                                          {v1::AppendPart::kVFieldNumber, &TensorDataSchema()}};
  static const wire::MessageSchema kPartSchema = {*kPartFields};
  static const auto* const kFields =
      new std::vector<wire::PayloadField>{{v1::AppendRequest::kPartsFieldNumber, &kPartSchema}};
  static const wire::MessageSchema kSchema = {*kFields};
  return kSchema;
}

const wire::MessageSchema& KvChunkSchema() {
  static const auto* const kTokensFields = new std::vector<wire::PayloadField>{
      {v1::KvTokens::kKFieldNumber}, {v1::KvTokens::kVFieldNumber}};
  static const wire::MessageSchema kTokensSchema = {*kTokensFields};
  static const auto* const kFields =
      new std::vector<wire::PayloadField>{{v1::KvChunk::kTokensFieldNumber, &kTokensSchema}};
  static const wire::MessageSchema kSchema = {*kFields};
  return kSchema;
}

absl::StatusOr<DecodedAttend> DecodeAttendCached(const MessageBytes& message) {
  RAPT_ASSIGN_OR_RETURN(wire::SplitMessage split, wire::Split(message.bytes, message.size,
                                                              AttendCachedSchema(), kAttendLimits));
  AttendMessage fields;
  RAPT_RETURN_IF_ERROR(ParseRequest(split.rest, fields));
  DecodedAttend decoded;
  cache::AttendCall& call = decoded.call;
  decoded.priority = fields.priority();
  for (const wire::Payload& payload : split.payloads) {
    for (const InputField& field : kAttendInputs) {
      if (field.number != payload.path[0]) continue;
      (call.*field.tensor).bytes = message.Part(payload.begin, payload.size);
    }
  }
  RAPT_RETURN_IF_ERROR(ReadAttributes(fields, call));
  for (const InputField& field : kAttendInputs) {
    if (!(fields.*field.has)()) continue;
    RAPT_RETURN_IF_ERROR(ReadCallTensor(field.role, (fields.*field.get)(), call.*field.tensor));
  }
  return decoded;
}

absl::StatusOr<DecodedAppend> DecodeAppend(const MessageBytes& message) {
  RAPT_ASSIGN_OR_RETURN(wire::SplitMessage split,
                        wire::Split(message.bytes, message.size, AppendSchema(), kAppendLimits));
  v1::AppendRequest fields;
  RAPT_RETURN_IF_ERROR(ParseRequest(split.rest, fields));
  const auto count = static_cast<size_t>(fields.parts_size());
  if (count > cache::kMaxItems) {
    return Invalid("parts has ", count, " entries; at most ", cache::kMaxItems, " are allowed");
  }
  DecodedAppend decoded;
  decoded.partial = fields.return_partial_success();
  decoded.priority = fields.priority();
  decoded.parts.resize(count);
  for (const wire::Payload& payload : split.payloads) {
    cache::AppendPart& part = decoded.parts[static_cast<size_t>(payload.index)];
    cache::CallTensor& tensor = payload.path[1] == v1::AppendPart::kKFieldNumber ? part.k : part.v;
    tensor.bytes = message.Part(payload.begin, payload.size);
  }
  for (size_t n = 0; n < count; ++n) {
    const v1::AppendPart& from = fields.parts(static_cast<int>(n));
    cache::AppendPart& part = decoded.parts[n];
    part.call = {
        .cache = ReadId(from.cache()), .layer = from.layer(), .generation = from.generation()};
    if (from.has_at()) part.call.at = from.at();
    absl::Status status;
    if (from.has_k()) status = ReadCallTensor(Role::kK, from.k(), part.k);
    if (status.ok() && from.has_v()) status = ReadCallTensor(Role::kV, from.v(), part.v);
    if (status.ok()) continue;
    return Invalid("parts[", n, "]: ", std::string(status.message()));
  }
  return decoded;
}

absl::StatusOr<DecodedKvChunk> DecodeKvChunk(const MessageBytes& message) {
  RAPT_ASSIGN_OR_RETURN(wire::SplitMessage split,
                        wire::Split(message.bytes, message.size, KvChunkSchema(), kKvChunkLimits));
  v1::KvChunk fields;
  RAPT_RETURN_IF_ERROR(ParseRequest(split.rest, fields));
  if (fields.has_header()) return ReadHeader(fields.header());
  if (fields.has_end()) return ReadEnd(fields.end());
  if (!fields.has_tokens()) return Invalid("the message has neither header, tokens nor end");
  cache::KvTokens tokens{.layer = fields.tokens().layer(),
                         .at = fields.tokens().at(),
                         .count = fields.tokens().tokens()};
  for (const wire::Payload& payload : split.payloads) {
    const bool is_key = payload.path[1] == v1::KvTokens::kKFieldNumber;
    (is_key ? tokens.keys : tokens.values) = message.Part(payload.begin, payload.size);
  }
  return DecodedKvChunk{tokens, ChecksumIn(fields.tokens())};
}

uint32_t ChecksumOf(const cache::KvTokens& tokens) {
  uint32_t crc = Crc32(FieldsBeforeKeys(tokens.layer, tokens.at, tokens.count));
  crc = Crc32OfField(v1::KvTokens::kKFieldNumber, tokens.keys, crc);
  return Crc32OfField(v1::KvTokens::kVFieldNumber, tokens.values, crc);
}

absl::Status CheckChecksum(const DecodedKvChunk& chunk) {
  const auto* tokens = std::get_if<cache::KvTokens>(&chunk.part);
  if (tokens == nullptr) return absl::OkStatus();
  return CheckChecksum(absl::StrCat("tokens ", tokens->at, " to ", tokens->at + tokens->count,
                                    " of layer ", tokens->layer),
                       chunk.crc32, ChecksumOf(*tokens));
}

absl::StatusOr<v1::ExportRequest> DecodeExport(const MessageBytes& message) {
  v1::ExportRequest request;
  RAPT_RETURN_IF_ERROR(ParseRequest(message.ToString(), request));
  request.set_cache(ReadId(request.cache()));
  return request;
}

ResponseMessage EncodeAttendCached(const TensorOperator& op,
                                   absl::Span<const cache::AppendResult> items,
                                   const Result& result) {
  ResponseMessage response;
  AppendTensor(AttendResponse::kYFieldNumber, *op.outputs()[Role::kY], /*place=*/nullptr,
               result.outputs[Role::kY], response);
  if (op.outputs()[Role::kLse]) {
    AppendTensor(AttendResponse::kLseFieldNumber, *op.outputs()[Role::kLse], /*place=*/nullptr,
                 result.outputs[Role::kLse], response);
  }
  AttendResponse fields;
  for (const cache::AppendResult& item : items) WriteResult(item, *fields.add_items());
  response.Append(fields.SerializeAsString());
  response.Append(EndOf(kEndFields<AttendResponse>, result));
  response.KeepEncodingMemory(result.encoding_memory);
  return response;
}

ResponseMessage EncodeAppend(absl::Span<const cache::AppendResult> parts) {
  v1::AppendResponse fields;
  for (const cache::AppendResult& part : parts) WriteResult(part, *fields.add_results());
  ResponseMessage response;
  response.Append(fields.SerializeAsString());
  return response;
}

ResponseMessage EncodeDiagnosis(cache::CachedDiagnosis& diagnosis, const PlanOptions& options) {
  const DiagnosisReport report = diagnosis.Finish(options);
  InputMap<v1::Tensor> tensors;
  for (const TensorSummary& input : report.inputs) {
    const TensorSpec& spec = diagnosis.spec(input.role);
    tensors[input.role].set_dtype(CodeOf(spec.dtype));
    tensors[input.role].mutable_shape()->Assign(spec.shape.begin(), spec.shape.end());
  }
  v1::DiagnoseResponse fields;
  EncodeDiagnosis(
      report, [&](Role role) -> const v1::Tensor& { return tensors[role]; }, fields);
  ResponseMessage response;
  response.Append(fields.SerializeAsString());
  return response;
}

ResponseMessage EncodeKvHeader(const cache::KvHeader& header) {
  v1::KvChunk chunk;
  WriteCreate(header.cache, *chunk.mutable_header()->mutable_cache());
  chunk.mutable_header()->mutable_lengths()->Assign(header.lengths.begin(), header.lengths.end());
  chunk.mutable_header()->set_crc32(ChecksumOfPart(chunk.header()));
  ResponseMessage response;
  response.Append(chunk.SerializeAsString());
  return response;
}

ResponseMessage EncodeKvTokens(const cache::Exporter::Chunk& chunk, uint32_t crc32,
                               const OutputBuffer& keys, const OutputBuffer& values) {
  std::string k = FieldsBeforeKeys(chunk.layer, chunk.at, chunk.count);
  wire::AppendFieldHeader(v1::KvTokens::kKFieldNumber, chunk.key_bytes, k);
  std::string v;
  wire::AppendFieldHeader(v1::KvTokens::kVFieldNumber, chunk.value_bytes, v);
  v1::KvTokens last;
  last.set_crc32(crc32);
  const std::string end = last.SerializeAsString();
  std::string header;
  wire::AppendFieldHeader(
      v1::KvChunk::kTokensFieldNumber,
      static_cast<int64_t>(k.size() + v.size() + end.size()) + chunk.key_bytes + chunk.value_bytes,
      header);
  ResponseMessage response;
  response.Append(header + k);
  response.Append(keys);
  response.Append(v);
  response.Append(values);
  response.Append(end);
  return response;
}

ResponseMessage EncodeKvEnd(const cache::KvEnd& end) {
  v1::KvChunk chunk;
  chunk.mutable_end()->set_chunks(end.chunks);
  chunk.mutable_end()->set_crc32(ChecksumOfPart(chunk.end()));
  ResponseMessage response;
  response.Append(chunk.SerializeAsString());
  return response;
}

ResponseMessage EncodeCache(const cache::CacheInfo& info) {
  v1::Cache cache;
  Encode(info, cache);
  ResponseMessage response;
  response.Append(cache.SerializeAsString());
  return response;
}

absl::StatusOr<cache::CacheSpec> DecodeCreate(const v1::CreateRequest& request) {
  RAPT_ASSIGN_OR_RETURN(const DType dtype, ReadFloatType("dtype", request.dtype()));
  if (!v1::Storage_IsValid(request.storage())) {
    return UnknownValue("storage", request.storage(), "STORAGE_PLAIN (0) or STORAGE_INT8 (1)");
  }
  cache::CacheSpec spec;
  spec.name = request.name();
  for (const v1::LayerShape& shape : request.shapes()) {
    cache::LayerShape& layers = spec.shapes.emplace_back();
    layers.layers = shape.layers();
    layers.token = {.kv_heads = shape.kv_heads(),
                    .head_size = shape.head_size(),
                    .value_head_size =
                        shape.value_head_size() == 0 ? shape.head_size() : shape.value_head_size(),
                    .dtype = dtype,
                    .q8_0 = request.storage() == v1::STORAGE_INT8};
    layers.keep_first = shape.keep_first();
    layers.keep_last = shape.keep_last();
  }
  spec.first_position = request.first_position();
  spec.reserve_tokens = request.reserve_tokens();
  spec.lease = FromMilliseconds(request.lease_ms());
  return spec;
}

cache::ForkSpec DecodeFork(const v1::ForkRequest& request) {
  cache::ForkSpec spec;
  spec.cache = ReadId(request.cache());
  spec.generation = request.generation();
  if (request.has_length()) spec.length = request.length();
  spec.name = request.name();
  spec.reserve_tokens = request.reserve_tokens();
  spec.lease = FromMilliseconds(request.lease_ms());
  return spec;
}

void Encode(const cache::CacheInfo& info, v1::Cache& cache) {
  const cache::CacheSpec& spec = info.spec;
  cache.set_id(info.id);
  cache.set_name(spec.name);
  for (const cache::LayerShape& shape : spec.shapes) WriteShape(shape, *cache.add_shapes());
  cache.set_dtype(CodeOf(spec.shapes.front().token.dtype));
  cache.set_storage(StorageOf(spec));
  cache.set_first_position(spec.first_position);
  cache.mutable_lengths()->Assign(info.lengths.begin(), info.lengths.end());
  cache.set_generation(info.generation);
  cache.set_lease_ms(Milliseconds(spec.lease));
  cache.set_expires_in_ms(Milliseconds(info.expires_in));
  cache.set_reserve_tokens(spec.reserve_tokens);
  cache.set_bytes(info.bytes);
  cache.set_shared_bytes(info.shared_bytes);
}

void Encode(const cache::CacheList& list, v1::Caches& caches) {
  for (const cache::CacheInfo& info : list.caches) Encode(info, *caches.add_caches());
  for (const cache::Missing& missing : list.missing) {
    v1::Missing& to = *caches.add_missing();
    to.set_cache(missing.id);
    to.set_reason(std::string(NameOf(missing.reason)));
  }
  caches.set_next_page_token(list.next_page_token);
}

void Encode(const absl::StatusOr<cache::CacheInfo>& info, v1::UpdateResult& result) {
  if (!info.ok()) return WriteStatus(info.status(), result);
  Encode(*info, *result.mutable_cache());
  result.mutable_cache()->clear_shapes();
}

absl::Status CheckUpdate(const v1::UpdateRequest& request) {
  const int count = request.forks_size() + request.truncates_size() + request.closes_size();
  if (count < 1 || static_cast<size_t>(count) > kMaxIds) {
    return Invalid("forks, truncates and closes have ", count, " entries; they must have 1 to ",
                   kMaxIds);
  }
  absl::flat_hash_set<absl::string_view> truncated, closed;
  for (const v1::TruncateRequest& truncate : request.truncates()) {
    if (truncated.insert(truncate.cache()).second) continue;
    return Invalid("truncates[", truncated.size(), "].cache occurs twice");
  }
  for (const std::string& id : request.closes()) {
    if (!closed.insert(id).second) return Invalid("closes[", closed.size(), "] occurs twice");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> DecodeIds(const v1::Ids& ids) {
  const auto count = static_cast<size_t>(ids.caches_size());
  if (count < 1 || count > kMaxIds) {
    return Invalid("caches has ", count, " ids; it must have 1 to ", kMaxIds);
  }
  absl::flat_hash_set<absl::string_view> seen;
  std::vector<std::string> read;
  for (const std::string& id : ids.caches()) {
    if (id.empty()) return Invalid("caches[", read.size(), "] is empty");
    if (!seen.insert(id).second) {
      return Invalid("caches[", read.size(), "] occurs twice");
    }
    read.push_back(ReadId(id));
  }
  return read;
}

}  // namespace rapt::native
