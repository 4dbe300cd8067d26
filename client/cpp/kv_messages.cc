#include "client/cpp/kv_messages.h"

#include <chrono>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/checked_math.h"
#include "base/crc32.h"
#include "base/status_macros.h"
#include "client/cpp/byte_size.h"
#include "client/cpp/cache_codec.h"
#include "client/cpp/codec.h"

namespace rapt::client {
namespace {

// REQUIRES: FromProto() of its type is `dtype`.
CacheHeader DecodeHeader(const v1::KvHeader& message, DType dtype) {
  const v1::CreateRequest& cache = message.cache();
  return {.cache = {.shapes = DecodeShapes(cache.shapes()),
                    .dtype = dtype,
                    .storage = DecodeStorage(cache.storage()),
                    .name = cache.name(),
                    .reserve_tokens = cache.reserve_tokens(),
                    .lease = std::chrono::milliseconds(cache.lease_ms()),
                    .first_position = cache.first_position()},
          .lengths = {message.lengths().begin(), message.lengths().end()}};
}

// Sets the checksum of a part. REQUIRES: it has none.
template <typename Part>
void Seal(Part& part) {
  part.set_crc32(Crc32(part.SerializeAsString()));
}

// Removes the checksum of a part. Returns what is wrong with it, or nothing.
template <typename Part>
absl::string_view Unseal(Part& part) {
  if (!part.has_crc32()) return "crc32 is missing";
  const uint32_t crc = part.crc32();
  part.clear_crc32();
  return Crc32(part.SerializeAsString()) == crc ? "" : "crc32 is wrong: the data is damaged";
}

v1::KvChunk Encode(const CacheHeader& header) {
  v1::KvChunk message;
  *message.mutable_header()->mutable_cache() = Encode(header.cache);
  message.mutable_header()->mutable_lengths()->Assign(header.lengths.begin(), header.lengths.end());
  Seal(*message.mutable_header());
  return message;
}

v1::KvChunk Encode(const CacheChunk& chunk) {
  v1::KvChunk message;
  v1::KvTokens& tokens = *message.mutable_tokens();
  tokens.set_layer(chunk.layer);
  tokens.set_at(chunk.at);
  tokens.set_tokens(chunk.k.shape().empty() ? 0 : chunk.k.shape()[0]);
  tokens.set_k(chunk.k.bytes().data(), chunk.k.bytes().size());
  tokens.set_v(chunk.v.bytes().data(), chunk.v.bytes().size());
  Seal(tokens);
  return message;
}

// Returns nullptr for a layer that the cache does not have.
const LayerShape* ShapeOf(const CacheHeader& header, int64_t layer) {
  if (layer < 0) return nullptr;
  for (const LayerShape& shape : header.cache.shapes) {
    if (layer < shape.layers) return &shape;
    layer -= shape.layers;
  }
  return nullptr;
}

// The elements of a head's row, as they are stored.
struct RowForm {
  DType dtype;
  int64_t size;
};

RowForm RowOf(const CacheOptions& cache, int64_t size) {
  if (cache.storage == CacheStorage::kPlain) return {cache.dtype, size};
  constexpr int64_t kBlock = 32;  // numbers with one scale of two bytes
  const int64_t blocks = size / kBlock + (size % kBlock > 0 ? 1 : 0);
  return {DType::kUint8, CheckedAdd(size, 2 * blocks).value_or(-1)};
}

}  // namespace

absl::StatusOr<CacheHeader> KvMessageReader::Begin() {
  RAPT_RETURN_IF_ERROR(Open());
  v1::KvChunk message;
  RAPT_RETURN_IF_ERROR(Read(message));
  if (!message.has_header()) return Malformed("the first message is not a header");
  if (const absl::string_view why = Unseal(*message.mutable_header()); !why.empty()) {
    return Malformed(absl::StrCat("the header's ", why));
  }
  const absl::StatusOr<DType> dtype = FromProto("the cache", message.header().cache().dtype());
  if (!dtype.ok()) return Malformed("the cache has an unknown data type");
  if (!v1::Storage_IsValid(message.header().cache().storage())) {
    return Malformed("the cache is stored in an unknown way");
  }
  header_ = DecodeHeader(message.header(), *dtype);
  chunks_ = 0;
  return header_;
}

absl::StatusOr<std::optional<CacheChunk>> KvMessageReader::Next() {
  v1::KvChunk message;
  RAPT_RETURN_IF_ERROR(Read(message));
  if (message.has_tokens()) {
    RAPT_ASSIGN_OR_RETURN(CacheChunk chunk, Decode(std::move(*message.mutable_tokens())));
    ++chunks_;
    return std::optional<CacheChunk>(std::move(chunk));
  }
  if (!message.has_end()) return Malformed("a message has neither tokens nor an end");
  if (const absl::string_view why = Unseal(*message.mutable_end()); !why.empty()) {
    return Malformed(absl::StrCat("the end's ", why));
  }
  if (message.end().chunks() != chunks_) {
    return Malformed(
        absl::StrCat("the end counts ", message.end().chunks(), " chunks; ", chunks_, " came"));
  }
  RAPT_RETURN_IF_ERROR(Finish());
  return std::optional<CacheChunk>();
}

absl::StatusOr<CacheChunk> KvMessageReader::Decode(v1::KvTokens tokens) const {
  const auto fail = [&](absl::string_view why) {
    return Malformed(absl::StrCat("chunk ", chunks_, ": ", why));
  };
  if (const absl::string_view why = Unseal(tokens); !why.empty()) return fail(why);
  const LayerShape* const layer = ShapeOf(header_, tokens.layer());
  if (layer == nullptr) return fail(absl::StrCat("the cache has no layer ", tokens.layer()));
  const int64_t value_size =
      layer->value_head_size == 0 ? layer->head_size : layer->value_head_size;
  CacheChunk chunk{.layer = tokens.layer(), .at = tokens.at(), .k = {}, .v = {}};
  const auto take = [&](const char* name, int64_t size, std::string& bytes, Tensor& tensor) {
    const RowForm row = RowOf(header_.cache, size);
    Shape shape = {tokens.tokens(), layer->kv_heads, row.size};
    const std::optional<int64_t> wanted = ByteSize(row.dtype, shape);
    if (!wanted || *wanted != static_cast<int64_t>(bytes.size())) {
      return fail(
          absl::StrCat(name, " has ", bytes.size(), " bytes; its shape is ", ToString(shape)));
    }
    tensor = Tensor(row.dtype, std::move(shape), std::move(bytes));
    return absl::OkStatus();
  };
  RAPT_RETURN_IF_ERROR(take("k", layer->head_size, *tokens.mutable_k(), chunk.k));
  RAPT_RETURN_IF_ERROR(take("v", value_size, *tokens.mutable_v(), chunk.v));
  return chunk;
}

absl::Status WriteKvMessages(CacheReader& from, absl::FunctionRef<void(CacheHeader&)> change,
                             absl::FunctionRef<bool(const v1::KvChunk&)> write) {
  RAPT_ASSIGN_OR_RETURN(CacheHeader header, from.Begin());
  change(header);
  if (!write(Encode(header))) return absl::OkStatus();
  int64_t chunks = 0;
  for (;;) {
    RAPT_ASSIGN_OR_RETURN(const std::optional<CacheChunk> chunk, from.Next());
    if (!chunk) break;
    if (!write(Encode(*chunk))) return absl::OkStatus();
    ++chunks;
  }
  v1::KvChunk end;
  end.mutable_end()->set_chunks(chunks);
  Seal(*end.mutable_end());
  write(end);
  return absl::OkStatus();
}

}  // namespace rapt::client
