#include "server/cache/cached_attention.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "attention/q8_0.h"
#include "base/invalid.h"
#include "base/range.h"
#include "base/status_macros.h"
#include "server/cache/preparation.h"

namespace rapt::cache {
namespace {

// Shorter prefixes, and fewer rows of a key/value head, gain nothing when they are read together.
constexpr int64_t kLeastPrefixTokens = 512;
constexpr int64_t kLeastSharedRows = 8;

std::string ItemName(absl::string_view field, size_t n) {
  return absl::StrCat(field, "[", n, "]: ");
}

// "Hkv 8, D 128, Dv 128, FP16 stored as INT8"
std::string Describe(const TokenShape& shape) {
  return absl::StrCat("Hkv ", shape.kv_heads, ", D ", shape.head_size, ", Dv ",
                      shape.value_head_size, ", ", std::string(NameOf(shape.dtype)),
                      shape.q8_0 ? " stored as INT8" : "");
}

// Copies [heads, tokens, size] to [tokens, heads, size], the shape.
void Transpose(const InputBytes& from, const TensorSpec& spec, std::byte* to) {
  const int64_t tokens = spec.shape[0], heads = spec.shape[1];
  const int64_t row_bytes = spec.shape[2] * SizeOf(spec.dtype);
  for (int64_t h = 0; h < heads; ++h) {
    for (int64_t t = 0; t < tokens; ++t) {
      from.Copy((h * tokens + t) * row_bytes, row_bytes, to + (t * heads + h) * row_bytes);
    }
  }
}

bool IsTransposed(const CallTensor& tensor) {
  const Shape& shape = tensor.spec->shape;
  return tensor.heads_first && shape[0] > 1 && shape[1] > 1;
}

// Returns the bytes that Arrange() needs for copies of a tensor. One on a device is copied once
// more if it is transposed.
int64_t ArrangedBytes(const CallTensor& tensor) {
  if (!tensor.spec) return 0;
  if (!IsTransposed(tensor)) return GatheredBytes(tensor.bytes);
  return tensor.bytes.size * (tensor.bytes.on_device() ? 2 : 1);
}

// Returns the bytes of a tensor in the layout of its shape. Takes ArrangedBytes() from the memory.
absl::StatusOr<const std::byte*> Arrange(const CallTensor& tensor, absl::Span<std::byte>& memory) {
  if (!tensor.spec) return nullptr;
  if (!IsTransposed(tensor)) return Gather(tensor.bytes, memory);
  std::byte* const copy = TakeFrom(memory, tensor.bytes.size);
  InputBytes from = tensor.bytes;
  if (from.on_device()) {
    RAPT_ASSIGN_OR_RETURN(const auto fetched, Gather(from, memory));
    from = InputBytes(fetched, from.size);
  }
  Transpose(from, *tensor.spec, copy);
  return copy;
}

// Returns the bytes that Store() needs.
int64_t StoredBytes(const CallTensor& tensor, bool q8_0) {
  const int64_t arranged = ArrangedBytes(tensor);
  if (!q8_0 || !tensor.spec) return arranged;
  const Shape& shape = tensor.spec->shape;
  return arranged + shape[0] * shape[1] * q8_0::RowBytes(shape[2]);
}

// Returns the bytes of a tensor as caches store them. Takes StoredBytes() from the memory.
absl::StatusOr<const std::byte*> Store(const CallTensor& tensor, bool q8_0,
                                       absl::Span<std::byte>& memory) {
  absl::StatusOr<const std::byte*> numbers = Arrange(tensor, memory);
  if (!numbers.ok() || !q8_0 || !tensor.spec) return numbers;
  const Shape& shape = tensor.spec->shape;
  const int64_t rows = shape[0] * shape[1], row_bytes = q8_0::RowBytes(shape[2]);
  std::byte* const stored = TakeFrom(memory, rows * row_bytes);
  for (int64_t n = 0; n < rows; ++n) {
    q8_0::StoreRow(*numbers + n * shape[2] * SizeOf(tensor.spec->dtype), tensor.spec->dtype,
                   shape[2], stored + n * row_bytes);
  }
  return stored;
}

// The keys and values of a call as caches store them.
struct StoredTokens {
  const std::byte* keys;
  const std::byte* values;
};

absl::StatusOr<StoredTokens> Store(const CallTensor& k, const CallTensor& v, bool q8_0,
                                   absl::Span<std::byte>& memory) {
  RAPT_ASSIGN_OR_RETURN(const auto keys, Store(k, q8_0, memory));
  RAPT_ASSIGN_OR_RETURN(const auto values, Store(v, q8_0, memory));
  return StoredTokens{keys, values};
}

// The tensors of a layer that failed are not checked, and not stored.
bool IsInEightBits(const LayerState& layer) { return layer.status.ok() && layer.shape.token.q8_0; }

// InvalidArgument for an item that no cache can answer.
absl::Status CheckItem(const AttendItem& item) {
  absl::Status status = CheckRange("rows", item.rows, kCounts);
  status.Update(CheckRange("new_tokens", item.call.count, kCounts));
  if (item.position) status.Update(CheckRange("position", *item.position, kCounts));
  if (!status.ok()) return status;
  if (item.rows == 0 && item.call.count == 0) {
    return Invalid("rows and new_tokens are both 0; an item needs one of them");
  }
  return status;
}

}  // namespace

absl::Status CachedAttention::CheckTensor(const CallTensor& tensor, const Shape& shape) const {
  if (!tensor.spec) {
    if (shape[0] == 0) return absl::OkStatus();
    return Invalid(tensor.name, " is absent; the items need ", ToString(shape));
  }
  if (tensor.spec->dtype != ragged_.dtype) {
    return Invalid(tensor.name, " is ", std::string(NameOf(tensor.spec->dtype)),
                   "; the caches hold ", std::string(NameOf(ragged_.dtype)));
  }
  if (tensor.spec->shape == shape) return absl::OkStatus();
  return Invalid(tensor.name, " has shape ", ToString(tensor.spec->shape),
                 "; the items and their caches need ", ToString(shape));
}

// Takes the shapes of the first cache that was found, which the others must have.
absl::Status CachedAttention::CheckShapes(absl::Span<const LayerState> states) {
  std::optional<TokenShape> token;
  for (size_t n = 0; n < states.size(); ++n) {
    if (!states[n].status.ok()) continue;
    if (!token) token = states[n].shape.token;
    if (states[n].shape.token == *token) continue;
    return Invalid(ItemName("items", n), "the layer has ", Describe(states[n].shape.token),
                   "; other items have ", Describe(*token));
  }
  const Shape none = {0, 1, 1};
  const Shape& q = call_.q.spec ? call_.q.spec->shape : none;
  const Shape& v = call_.v.spec ? call_.v.spec->shape : none;
  if (q.size() != 3 || v.size() != 3) {
    return Invalid("q, k and v must have rank 3: [rows or tokens, heads, head size]");
  }
  if (!token) {  // every item failed; the tensors' own shapes are as good as any
    token = TokenShape{.kv_heads = std::max<int64_t>(1, v[1]),
                       .head_size = std::max<int64_t>(1, q[2]),
                       .value_head_size = std::max<int64_t>(1, v[2]),
                       .dtype = call_.q.spec ? call_.q.spec->dtype : DType::kFloat32};
  }
  token_ = *token;
  ragged_.dtype = token->dtype;
  ragged_.q8_0 = token->q8_0;
  ragged_.kv_heads = token->kv_heads;
  ragged_.head_size = token->head_size;
  ragged_.value_head_size = token->value_head_size;
  // On a device, an item's bits depend on the others.
  if (call_.shares_prefixes) ragged_.page_rows = kPageTokens;
  ragged_.query_heads = call_.q.spec ? q[1] : token->kv_heads;
  if (ragged_.query_heads < 1 || ragged_.query_heads % ragged_.kv_heads != 0) {
    return Invalid("q has ", ragged_.query_heads,
                   " heads; they must be a positive multiple of the caches' ", ragged_.kv_heads);
  }
  return absl::OkStatus();
}

absl::Status CachedAttention::Check(absl::Span<const LayerState> states) {
  RAPT_RETURN_IF_ERROR(CheckShapes(states));
  int64_t rows = 0, tokens = 0;
  for (const AttendItem& item : call_.items) {
    rows += item.rows;
    tokens += item.call.count;
  }
  absl::Status status = CheckTensor(call_.q, {rows, ragged_.query_heads, ragged_.head_size});
  status.Update(CheckTensor(call_.k, {tokens, ragged_.kv_heads, ragged_.head_size}));
  status.Update(CheckTensor(call_.v, {tokens, ragged_.kv_heads, ragged_.value_head_size}));
  if (!status.ok()) return status;
  if (call_.left_window && *call_.left_window < 0) {
    return Invalid("window.left is ", *call_.left_window, "; it must be at least 0, or absent");
  }
  if (call_.head_sink.spec) {
    const TensorSpec& sink = *call_.head_sink.spec;
    const Shape shape = {ragged_.query_heads};
    if (sink.shape != shape) {
      return Invalid(call_.head_sink.name, " has shape ", ToString(sink.shape), "; it must be ",
                     ToString(shape));
    }
    RAPT_RETURN_IF_ERROR(
        CheckTableType(call_.head_sink.name, sink.dtype, ragged_.dtype, "the caches"));
    ragged_.head_sink = sink.dtype;
  }
  // Partial results of 16-bit caches need FP32.
  const bool is_wide = ragged_.dtype == DType::kFloat32 || ragged_.dtype == DType::kFloat64;
  if (call_.output && *call_.output != ragged_.dtype &&
      (is_wide || *call_.output != DType::kFloat32)) {
    return Invalid("output is ", std::string(NameOf(*call_.output)), "; it must be the caches' ",
                   std::string(NameOf(ragged_.dtype)), is_wide ? "" : " or FP32");
  }
  return absl::OkStatus();
}

// Where the rows of an item stand, and what they see.
void CachedAttention::SetItem(size_t n, const LayerState& state) {
  const AttendItem& item = call_.items[n];
  RaggedItem& ragged = ragged_.items[n];
  ragged.rows = item.rows;
  if (!state.status.ok()) return;
  ragged.keys = state.at + item.call.count;
  ragged.position = item.position ? *item.position - state.first_position : ragged.keys - item.rows;
  ragged.first_keys = std::max<int64_t>(0, state.shape.keep_first - state.first_position);
  ragged.left_window = call_.left_window.value_or(-1);
  if (state.shape.keep_last > 0) {
    const int64_t kept = state.shape.keep_last - 1;
    ragged.left_window = ragged.left_window < 0 ? kept : std::min(kept, ragged.left_window);
  }
  NewTokens& tokens = tokens_[n];
  tokens.visible = VisibleTokensOf(ragged);
  if (item.rows > 0) tokens.first_row = ragged.position;
}

// Finds the items whose caches begin with the same pages. A fork has the pages of its parent up to
// the page where they part, so items with the same page at one place have the same ones before.
void CachedAttention::FindPrefixes(absl::Span<const LayerState> states) {
  constexpr int64_t kLeastPages = kLeastPrefixTokens / kPageTokens;
  std::map<const std::byte*, std::vector<int64_t>> sharers;
  for (size_t n = 0; n < states.size(); ++n) {
    if (!states[n].before || !SeesAll(ragged_.items[n], kLeastPrefixTokens)) continue;
    if (states[n].at < kLeastPrefixTokens) continue;
    const std::byte* const page = states[n].before->pages()[kLeastPages - 1];
    if (page != nullptr) sharers[page].push_back(static_cast<int64_t>(n));
  }
  for (auto& [page, items] : sharers) {
    const auto first = states[items[0]].before->pages();
    auto pages = static_cast<int64_t>(first.size());
    int64_t rows = 0;
    for (int64_t n : items) {
      const auto own = states[n].before->pages();
      int64_t same = 0;
      while (same < std::min(pages, states[n].at / kPageTokens) && own[same] == first[same] &&
             SeesAll(ragged_.items[n], (same + 1) * kPageTokens)) {
        ++same;
      }
      pages = same;
      rows += ragged_.items[n].rows;
    }
    const bool gains = items.size() > 1 && pages >= kLeastPages &&
                       rows * (ragged_.query_heads / ragged_.kv_heads) > kLeastSharedRows;
    if (gains) ragged_.prefixes.push_back({pages * kPageTokens, std::move(items)});
  }
}

void CachedAttention::CountRead(CacheStore& store) const {
  const int64_t token_bytes = token_.key_bytes() + token_.value_bytes();
  int64_t tokens = 0, saved = 0;
  for (const RaggedItem& item : ragged_.items) {
    const VisibleTokens visible = VisibleTokensOf(item);
    for (const TokenRange& range : {visible.first, visible.recent}) {
      if (!range.empty()) tokens += range.end - range.begin;
    }
  }
  for (const SharedPrefix& prefix : ragged_.prefixes) {
    saved += prefix.tokens * (static_cast<int64_t>(prefix.items.size()) - 1);
  }
  store.CountRead((tokens - saved) * token_bytes, saved * token_bytes);
}

absl::StatusOr<std::shared_ptr<const TensorOperator>> CachedAttention::Open(
    CacheStore& store, const std::string& owner, AttendCall call, CacheStore::Leases leases) {
  call_ = std::move(call);
  const size_t count = call_.items.size();
  if (count < 1 || count > kMaxItems) {
    return Invalid("items has ", count, " entries; it must have 1 to ", kMaxItems);
  }
  std::vector<LayerCall> layers;
  for (size_t n = 0; n < count; ++n) {
    if (absl::Status status = CheckItem(call_.items[n]); !status.ok()) {
      return Invalid(ItemName("items", n), std::string(status.message()));
    }
    layers.push_back(call_.items[n].call);
  }
  RAPT_ASSIGN_OR_RETURN(batch_, store.Open(owner, layers, "items", leases));
  RAPT_RETURN_IF_ERROR(batch_->FirstError(call_.partial));
  RAPT_RETURN_IF_ERROR(Check(batch_->states()));

  ragged_.scale = call_.scale;
  ragged_.softcap = call_.softcap;
  ragged_.bias_table = call_.bias_table;
  ragged_.max_distance = call_.max_distance;
  ragged_.output = call_.output;
  ragged_.wants_lse = call_.wants_lse;
  ragged_.heads_first = call_.q.heads_first;
  ragged_.lse_heads_first = call_.lse_heads_first;
  ragged_.items.resize(count);
  tokens_.resize(count);
  for (size_t n = 0; n < count; ++n) SetItem(n, batch_->states()[n]);
  if (call_.shares_prefixes) FindPrefixes(batch_->states());
  return MakeRaggedAttention(ragged_, *this);
}

absl::StatusOr<Request> CachedAttention::Start(CacheStore& store, const std::string& owner,
                                               AttendCall call) {
  RAPT_ASSIGN_OR_RETURN(auto op, Open(store, owner, std::move(call), CacheStore::Leases::kRenewed));
  Request request;
  request.model = Model::kAttentionSession;
  request.SetOperator(std::move(op));
  request.inputs[Role::kQ] = call_.q.bytes;
  request.inputs[Role::kHeadSink] = call_.head_sink.bytes;
  request.prepared_bytes = call_.k.bytes.size + call_.v.bytes.size;
  request.leaves_thread = call_.k.bytes.on_device() || call_.v.bytes.on_device();
  request.preparation_bytes = append_bytes();
  request.prepare = [this, &store](absl::Span<std::byte> memory) { return Append(store, memory); };
  return request;
}

int64_t CachedAttention::append_bytes() const {
  return StoredBytes(call_.k, token_.q8_0) + StoredBytes(call_.v, token_.q8_0);
}

absl::Status CachedAttention::AppendComputed(CacheStore& store, const std::byte* k,
                                             const std::byte* v, absl::Span<std::byte> memory) {
  call_.k.bytes.data = k;
  call_.v.bytes.data = v;
  absl::Status status = Append(store, memory);
  if (!status.ok()) results_.assign(call_.items.size(), AppendResult{.status = status});
  return status;
}

absl::Status CachedAttention::Append(CacheStore& store, absl::Span<std::byte> memory) {
  RAPT_ASSIGN_OR_RETURN(const StoredTokens stored, Store(call_.k, call_.v, token_.q8_0, memory));
  auto [keys, values] = stored;
  for (size_t n = 0; n < tokens_.size(); ++n) {
    const int64_t count = call_.items[n].call.count;
    if (count == 0) continue;
    tokens_[n].keys = keys;
    tokens_[n].values = values;
    keys += count * token_.key_bytes();
    values += count * token_.value_bytes();
  }
  RAPT_ASSIGN_OR_RETURN(results_, store.Append(*batch_, tokens_, call_.partial));
  CountRead(store);
  return absl::OkStatus();
}

absl::StatusOr<Request> CachedAppend::Start(CacheStore& store, const std::string& owner,
                                            std::vector<AppendPart> parts, bool partial) {
  if (parts.empty() || parts.size() > kMaxItems) {
    return Invalid("parts has ", parts.size(), " entries; it must have 1 to ", kMaxItems);
  }
  std::vector<LayerCall> layers;
  for (size_t n = 0; n < parts.size(); ++n) {
    AppendPart& part = parts[n];
    if (!part.k.spec || !part.v.spec || part.k.spec->shape.size() != 3) {
      return Invalid(ItemName("parts", n),
                     "k and v are needed, of shape [tokens, heads, head size]");
    }
    part.call.count = part.k.spec->shape[0];
    if (!part.call.at) {
      return Invalid(ItemName("parts", n), "at is absent; it is needed");
    }
    layers.push_back(part.call);
  }
  RAPT_ASSIGN_OR_RETURN(batch_, store.Open(owner, layers, "parts"));
  RAPT_RETURN_IF_ERROR(batch_->FirstError(partial));
  int64_t bytes = 0, workspace_bytes = 0;
  for (size_t n = 0; n < parts.size(); ++n) {
    const AppendPart& part = parts[n];
    const LayerState& state = batch_->states()[n];
    const TokenShape& token = state.shape.token;
    for (const auto& [tensor, size] :
         {std::pair{&part.k, token.head_size}, std::pair{&part.v, token.value_head_size}}) {
      if (!state.status.ok()) continue;
      const Shape shape = {part.call.count, token.kv_heads, size};
      if (tensor->spec->dtype == token.dtype && tensor->spec->shape == shape) continue;
      return Invalid(ItemName("parts", n), tensor->name, " is ",
                     std::string(NameOf(tensor->spec->dtype)), " ", ToString(tensor->spec->shape),
                     "; the layer needs ", std::string(NameOf(token.dtype)), " ", ToString(shape));
    }
    const bool q8_0 = IsInEightBits(state);
    workspace_bytes += StoredBytes(part.k, q8_0) + StoredBytes(part.v, q8_0);
    bytes += part.k.bytes.size + part.v.bytes.size;
  }
  parts_ = std::move(parts);
  return MakePreparation(
      [this, &store, partial](absl::Span<std::byte> memory) {
        return Append(store, partial, memory);
      },
      bytes, workspace_bytes);
}

absl::Status CachedAppend::Append(CacheStore& store, bool partial, absl::Span<std::byte> memory) {
  std::vector<NewTokens> tokens(parts_.size());
  for (size_t n = 0; n < parts_.size(); ++n) {
    const bool q8_0 = IsInEightBits(batch_->states()[n]);
    RAPT_ASSIGN_OR_RETURN(const StoredTokens stored, Store(parts_[n].k, parts_[n].v, q8_0, memory));
    tokens[n].keys = stored.keys;
    tokens[n].values = stored.values;
  }
  RAPT_ASSIGN_OR_RETURN(results_, store.Append(*batch_, tokens, partial));
  return absl::OkStatus();
}

}  // namespace rapt::cache
