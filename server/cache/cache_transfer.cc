#include "server/cache/cache_transfer.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/range.h"
#include "base/status_macros.h"
#include "server/cache/preparation.h"

namespace rapt::cache {
namespace {

constexpr int64_t kDefaultChunkBytes = int64_t{1} << 20;

int64_t BytesOf(const TokenShape& token) { return token.key_bytes() + token.value_bytes(); }

absl::Status CheckSize(absl::string_view name, const InputBytes& bytes, int64_t tokens,
                       int64_t token_bytes) {
  const std::optional<int64_t> needed = CheckedMul(tokens, token_bytes);
  if (needed && bytes.size == *needed) return absl::OkStatus();
  return Invalid(name, " has ", bytes.size, " bytes; ", tokens, " tokens of ", token_bytes,
                 " bytes are needed");
}

}  // namespace

Exporter::Exporter(CacheSnapshot cache, int64_t chunk_tokens, int64_t max_chunk_bytes)
    : cache_(std::move(cache)), chunk_tokens_(chunk_tokens), max_chunk_bytes_(max_chunk_bytes) {}

KvHeader Exporter::header() const {
  KvHeader header{.cache = cache_.spec};
  for (const Snapshot& layer : cache_.layers) header.lengths.push_back(layer.length());
  return header;
}

int64_t Exporter::TokensOfChunk(const TokenShape& token) const {
  const int64_t bytes = BytesOf(token);
  const int64_t wanted = chunk_tokens_ == 0 ? kDefaultChunkBytes / bytes : chunk_tokens_;
  return std::max<int64_t>(1, std::min(wanted, max_chunk_bytes_ / bytes));
}

int64_t Exporter::largest_chunk_bytes() const {
  int64_t largest = 0;
  for (size_t n = 0; n < cache_.layers.size(); ++n) {
    const TokenShape& token = cache_.shapes[n].token;
    const int64_t tokens = std::min(TokensOfChunk(token), cache_.layers[n].length());
    largest = std::max(largest, tokens * BytesOf(token));
  }
  return largest;
}

std::optional<Exporter::Chunk> Exporter::Next() {
  for (; layer_ < static_cast<int64_t>(cache_.layers.size()); ++layer_, at_ = 0) {
    const Snapshot& layer = cache_.layers[static_cast<size_t>(layer_)];
    const auto is_evicted = [&layer](int64_t token) {
      return layer.pages()[static_cast<size_t>(token / kPageTokens)] == nullptr;
    };
    const auto next_page = [](int64_t token) { return (token / kPageTokens + 1) * kPageTokens; };
    while (at_ < layer.length() && is_evicted(at_)) at_ = next_page(at_);
    if (at_ >= layer.length()) continue;
    const TokenShape& token = cache_.shapes[static_cast<size_t>(layer_)].token;
    const int64_t most = std::min(TokensOfChunk(token), layer.length() - at_);
    int64_t end = at_;
    while (end < at_ + most && !is_evicted(end)) end = std::min(next_page(end), at_ + most);
    const int64_t count = end - at_;
    ++chunks_;
    return Chunk{.layer = layer_,
                 .at = std::exchange(at_, end),
                 .count = count,
                 .key_bytes = count * token.key_bytes(),
                 .value_bytes = count * token.value_bytes()};
  }
  return std::nullopt;
}

void Exporter::Copy(const Chunk& chunk, std::byte* keys, std::byte* values) const {
  cache_.layers[static_cast<size_t>(chunk.layer)].CopyTokens(chunk.at, chunk.count, keys, values);
}

int64_t Importer::WorkspaceBytes(const KvPart& part) {
  const auto* tokens = std::get_if<KvTokens>(&part);
  return tokens == nullptr ? 0 : GatheredBytes(tokens->keys) + GatheredBytes(tokens->values);
}

absl::Status Importer::Take(const KvPart& part, absl::Span<std::byte> workspace) {
  if (has_ended_) return Invalid("a message came after the end");
  return std::visit([&](const auto& one) { return TakePart(one, workspace); }, part);
}

absl::Status Importer::TakePart(const KvHeader& header, absl::Span<std::byte> /*workspace*/) {
  if (draft_) return Invalid("the header came twice");
  absl::StatusOr<CacheStore::Draft> draft = store_.StartDraft(owner_, header.cache);
  if (absl::IsInvalidArgument(draft.status())) {
    return Invalid("header.cache.", std::string(draft.status().message()));
  }
  if (!draft.ok()) return draft.status();
  if (header.lengths.size() != draft->shapes().size()) {
    return Invalid("header.lengths has ", header.lengths.size(), " entries; the cache has ",
                   draft->shapes().size(), " layers");
  }
  for (size_t n = 0; n < header.lengths.size(); ++n) {
    RAPT_RETURN_IF_ERROR(
        CheckRange(absl::StrCat("header.lengths[", n, "]"), header.lengths[n], kCounts));
  }
  draft_ = *std::move(draft);
  lengths_ = header.lengths;
  return absl::OkStatus();
}

absl::Status Importer::CheckTokens(const KvTokens& tokens) const {
  const auto layers = static_cast<int64_t>(lengths_.size());
  if (tokens.layer < 0 || tokens.layer >= layers) {
    return Invalid("layer is ", tokens.layer, "; the cache has ", layers, " layers");
  }
  RAPT_RETURN_IF_ERROR(CheckRange("tokens", tokens.count, {1, kCounts.most}));
  const int64_t have = draft_->length(tokens.layer);
  const int64_t length = lengths_[static_cast<size_t>(tokens.layer)];
  if (tokens.at < have || tokens.at > length || tokens.count > length - tokens.at) {
    return Invalid("at is ", tokens.at, " and tokens is ", tokens.count, "; layer ", tokens.layer,
                   " has ", have, " tokens so far and ", length, " in the header");
  }
  const TokenShape& token = draft_->shapes()[static_cast<size_t>(tokens.layer)].token;
  absl::Status status = CheckSize("k", tokens.keys, tokens.count, token.key_bytes());
  status.Update(CheckSize("v", tokens.values, tokens.count, token.value_bytes()));
  return status;
}

absl::Status Importer::TakePart(const KvTokens& tokens, absl::Span<std::byte> workspace) {
  if (!draft_) return Invalid("tokens came before the header");
  absl::Status status = CheckTokens(tokens);
  if (status.ok() && tokens.at > draft_->length(tokens.layer)) {
    status = draft_->Skip(tokens.layer, tokens.at, lengths_[static_cast<size_t>(tokens.layer)]);
  }
  if (absl::IsInvalidArgument(status)) {
    return Invalid("chunk ", chunks_, ": ", std::string(status.message()));
  }
  if (!status.ok()) return status;
  ++chunks_;
  RAPT_ASSIGN_OR_RETURN(const auto keys, Gather(tokens.keys, workspace));
  RAPT_ASSIGN_OR_RETURN(const auto values, Gather(tokens.values, workspace));
  return draft_->Append(tokens.layer, tokens.count, keys, values);
}

absl::Status Importer::TakePart(const KvEnd& end, absl::Span<std::byte> /*workspace*/) {
  if (!draft_) return Invalid("the end came before the header");
  if (end.chunks != chunks_) {
    return Invalid("end.chunks is ", end.chunks, "; ", chunks_, " chunks came");
  }
  for (size_t n = 0; n < lengths_.size(); ++n) {
    const auto layer = static_cast<int64_t>(n);
    if (draft_->length(layer) == lengths_[n]) continue;
    // The last tokens of a layer may be evicted if no row but its own sees a token.
    absl::Status status = draft_->Skip(layer, lengths_[n], lengths_[n]);
    if (!absl::IsInvalidArgument(status)) {
      if (!status.ok()) return status;
      continue;
    }
    return Invalid("the end came; ", std::string(status.message()));
  }
  has_ended_ = true;
  return absl::OkStatus();
}

absl::StatusOr<CacheInfo> Importer::Finish() {
  if (!has_ended_) return Invalid("the stream ended without an end");
  return store_.Publish(*std::exchange(draft_, std::nullopt));
}

}  // namespace rapt::cache
