#include "server/cache/resident_cache.h"

#include <algorithm>
#include <limits>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt::cache {
namespace {

// The tokens of a layer that rows from `row` on, a token index, cannot see.
TokenRange UnseenFrom(int64_t row, const LayerShape& shape, int64_t first_position) {
  if (shape.keep_last == 0) return {};
  const int64_t begin = std::max<int64_t>(0, shape.keep_first - first_position);
  return {begin, std::max(begin, row < shape.keep_last ? 0 : row - shape.keep_last + 1)};
}

// Whether a row at token `row`, in front of which the layer ends, sees a token that is evicted, or
// would be written to a page that is.
bool NeedsEvicted(int64_t row, const LayerShape& shape, const PageList& list) {
  int64_t begin = row < shape.keep_last ? 0 : row - shape.keep_last + 1;
  if (row % kPageTokens != 0) begin = std::min(begin, row - 1);
  return list.evicted().Overlaps({begin, row});
}

}  // namespace

int64_t Account::left() const { return std::max<int64_t>(0, limit_ - bytes_); }

bool Account::TryCharge(int64_t bytes) {
  int64_t now = bytes_.load();
  while (limit_ <= 0 || bytes <= limit_ - now) {
    if (bytes_.compare_exchange_weak(now, now + bytes)) return true;
  }
  return false;
}

ResidentCache::ResidentCache(CacheContext& context, std::shared_ptr<Account> account,
                             std::string id, CacheSpec spec, Arena::Charge record)
    : context_(context),
      account_(std::move(account)),
      id_(std::move(id)),
      spec_(std::move(spec)),
      record_(std::move(record)) {
  for (const LayerShape& shape : spec_.shapes) {
    LayerShape one = shape;
    one.layers = 1;
    shapes_.insert(shapes_.end(), static_cast<size_t>(shape.layers), one);
  }
}

ResidentCache::~ResidentCache() {
  for (const PageList& layer : layers_) context_.reserved_bytes -= layer.reserved_bytes();
  AddCharged(-charged_);
  account_->Charge(-charged_tables_);
}

absl::StatusOr<std::shared_ptr<ResidentCache>> ResidentCache::Make(CacheContext& context,
                                                                   std::shared_ptr<Account> account,
                                                                   std::string id, CacheSpec spec) {
  int64_t layers = 0;
  for (const LayerShape& shape : spec.shapes) layers += shape.layers;
  absl::StatusOr<Arena::Charge> record =
      context.arena.TryCharge(kRecordBytes + layers * kLayerBytes);
  if (!record.ok()) {
    return context.refusals.Fail(Reason::kPages, record.status().code(), record.status().message());
  }
  std::shared_ptr<ResidentCache> cache(new ResidentCache(context, std::move(account), std::move(id),
                                                         std::move(spec), *std::move(record)));
  for (const LayerShape& shape : cache->shapes_) {
    cache->layers_.emplace_back(context.arena, shape.token);
  }
  return cache;
}

bool ResidentCache::WasMadeAs(const ResidentCache& other) const {
  return spec_.shapes == other.spec_.shapes && spec_.first_position == other.spec_.first_position &&
         forked_from_ == other.forked_from_ && forked_length_ == other.forked_length_;
}

bool ResidentCache::IsFork(const std::string& of, std::optional<int64_t> length) const {
  return !forked_from_.empty() && forked_from_ == of &&
         length.value_or(forked_length_) == forked_length_;
}

int64_t ResidentCache::Shortest() const {
  int64_t least = std::numeric_limits<int64_t>::max();
  for (const PageList& layer : layers_) least = std::min(least, layer.length());
  return least;
}

std::optional<int64_t> ResidentCache::ShortestIn(uint64_t generation) {
  MutexLock lock(mutex_);
  if (generation != generation_) return std::nullopt;
  return Shortest();
}

void ResidentCache::AddCharged(int64_t bytes) {
  charged_ += bytes;
  context_.reached_bytes += bytes;
  account_->Charge(bytes);
}

void ResidentCache::Settle(const Memory& before, const PageList& list) {
  AddCharged(list.bytes() - before.bytes);
  context_.reserved_bytes += list.reserved_bytes() - before.reserved;
}

absl::Status ResidentCache::ChargeOwner(int64_t bytes) const {
  if (account_->TryCharge(bytes)) return absl::OkStatus();
  return Fail(Reason::kQuota, absl::StatusCode::kResourceExhausted,
              absl::StrCat("needs ", bytes, " bytes of pages, ", account_->left(),
                           " are left of the caller's quota of ", account_->limit()));
}

absl::Status ResidentCache::ChargePages(int64_t bytes) {
  RAPT_RETURN_IF_ERROR(ChargeOwner(bytes));
  charged_ += bytes;
  context_.reached_bytes += bytes;
  return absl::OkStatus();
}

absl::Status ResidentCache::Reserve(PageList& list, int64_t count) {
  // More than the arena can have is not charged; PageList::Reserve() refuses it.
  const int64_t missing =
      count > context_.arena.capacity_bytes() ? 0 : list.MissingBytes(count).value_or(0);
  RAPT_RETURN_IF_ERROR(ChargePages(missing));
  const int64_t before = list.reserved_bytes();
  absl::Status status = list.Reserve(count);
  context_.reserved_bytes += list.reserved_bytes() - before;
  if (status.ok()) return status;
  AddCharged(-missing);
  return Fail(Reason::kPages, status.code(), status.message());
}

absl::Status ResidentCache::TakeMemory() {
  MutexLock lock(mutex_);
  int64_t bytes = 0;
  for (const PageList& list : layers_) bytes += list.bytes();
  RAPT_RETURN_IF_ERROR(ChargePages(bytes - charged_));
  for (PageList& list : layers_) {
    const int64_t more = std::max<int64_t>(0, spec_.reserve_tokens - list.length());
    RAPT_RETURN_IF_ERROR(Reserve(list, more));
  }
  return absl::OkStatus();
}

absl::Status ResidentCache::CheckGeneration(uint64_t generation) const {
  if (generation == generation_) return absl::OkStatus();
  return Fail(Reason::kGeneration, absl::StatusCode::kAborted,
              absl::StrCat("generation is ", generation, "; the cache has ", generation_));
}

// FailedPrecondition if the next row after `length` tokens needs an evicted one.
absl::Status ResidentCache::CheckCut(int64_t length) const {
  for (size_t n = 0; n < layers_.size(); ++n) {
    if (!NeedsEvicted(length, shapes_[n], layers_[n])) continue;
    const TokenRange& evicted = layers_[n].evicted();
    return Fail(Reason::kEvicted, absl::StatusCode::kFailedPrecondition,
                absl::StrCat("length is ", length, "; the next row would see tokens that layer ", n,
                             " has evicted: ", evicted.begin, " to ", evicted.end));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::shared_ptr<ResidentCache>> ResidentCache::Fork(std::string id, CacheSpec spec,
                                                                   uint64_t generation,
                                                                   std::optional<int64_t> length) {
  MutexLock lock(mutex_);
  RAPT_RETURN_IF_ERROR(CheckGeneration(generation));
  const int64_t least = Shortest();
  const int64_t tokens = length.value_or(least);
  if (tokens < 0 || tokens > least) {
    return absl::OutOfRangeError(
        absl::StrCat("length is ", tokens, "; the shortest layer has ", least, " tokens"));
  }
  RAPT_RETURN_IF_ERROR(CheckCut(tokens));
  RAPT_ASSIGN_OR_RETURN(std::shared_ptr<ResidentCache> fork,
                        Make(context_, account_, std::move(id), std::move(spec)));
  // The tables charge themselves, even beyond the limit. This refuses them in time.
  const absl::StatusOr<Arena::Charge> tables = context_.arena.TryCharge(
      static_cast<int64_t>(layers_.size()) * PageList::PagesOf(tokens) * kPageTableBytes);
  if (!tables.ok()) {
    return Fail(Reason::kPages, tables.status().code(), tables.status().message());
  }
  fork->forked_from_ = id_;
  fork->forked_length_ = tokens;
  for (size_t n = 0; n < layers_.size(); ++n) fork->layers_[n] = layers_[n].Fork(tokens);
  return fork;
}

absl::Status ResidentCache::TruncateLayers(int64_t length) {
  for (size_t n = 0; n < layers_.size(); ++n) {
    if (length >= 0 && length <= layers_[n].length()) continue;
    return absl::OutOfRangeError(
        absl::StrCat("length is ", length, "; layer ", n, " has ", layers_[n].length(), " tokens"));
  }
  RAPT_RETURN_IF_ERROR(CheckCut(length));
  struct Before {
    Memory memory;
    int64_t reserved_pages;
  };
  std::vector<Before> before;
  absl::Status status;
  for (PageList& layer : layers_) {
    before.push_back({MemoryOf(layer), layer.reserved_pages()});
    status = layer.ReserveToTruncate(length, spec_.reserve_tokens);
    if (!status.ok()) break;
  }
  for (size_t n = 0; n < before.size(); ++n) {
    PageList& layer = layers_[n];
    status.ok() ? layer.Truncate(length, spec_.reserve_tokens)
                : layer.KeepReserved(before[n].reserved_pages);
    Settle(before[n].memory, layer);
  }
  if (status.ok()) return status;
  return Fail(Reason::kPages, status.code(),
              absl::StrCat("for reserve_tokens: ", std::string(status.message())));
}

absl::Status ResidentCache::Truncate(int64_t length, uint64_t generation) {
  MutexLock lock(mutex_);
  const bool is_repeated = truncated_to_ == length && generation + 1 == generation_;
  if (is_repeated) return absl::OkStatus();
  RAPT_RETURN_IF_ERROR(CheckGeneration(generation));
  RAPT_RETURN_IF_ERROR(TruncateLayers(length));
  ++generation_;
  truncated_to_ = length;
  return absl::OkStatus();
}

absl::StatusOr<CacheSnapshot> ResidentCache::Freeze(uint64_t generation) {
  CacheSnapshot snapshot{.spec = spec_, .shapes = shapes_, .layers = {}};
  MutexLock lock(mutex_);
  RAPT_RETURN_IF_ERROR(CheckGeneration(generation));
  for (const PageList& layer : layers_) snapshot.layers.push_back(layer.Take(layer.length()));
  return snapshot;
}

ResidentCache::State ResidentCache::Look(bool counts_shared) {
  State state;
  MutexLock lock(mutex_);
  for (const PageList& layer : layers_) {
    state.lengths.push_back(layer.length());
    if (counts_shared) state.shared_bytes += layer.shared_bytes();
  }
  state.generation = generation_;
  state.bytes = charged_;
  return state;
}

absl::Status ResidentCache::CheckPlace(const LayerCall& call, LayerState& state) const {
  if (call.layer < 0 || call.layer >= static_cast<int64_t>(layers_.size())) {
    return Invalid("layer is ", call.layer, "; the cache has ", layers_.size(), " layers");
  }
  const auto layer = static_cast<size_t>(call.layer);
  state.shape = shapes_[layer];
  state.first_position = spec_.first_position;
  state.length = layers_[layer].length();
  state.at = call.at.value_or(state.length);
  if (!call.at && call.count > 0) return Invalid("at is absent; new tokens need it");
  RAPT_RETURN_IF_ERROR(CheckGeneration(call.generation));
  if (state.at < 0 || state.at > state.length) {
    return absl::OutOfRangeError(
        absl::StrCat("at is ", state.at, "; the layer has ", state.length, " tokens"));
  }
  if (state.at == state.length || call.count <= state.length - state.at) return absl::OkStatus();
  return Fail(Reason::kConflict, absl::StatusCode::kAborted,
              absl::StrCat("at is ", state.at, " and ", call.count, " tokens come; the layer has ",
                           state.length, " tokens, which is in the middle of them"));
}

LayerState ResidentCache::Find(const LayerCall& call) {
  LayerState state;
  MutexLock lock(mutex_);
  state.status = CheckPlace(call, state);
  if (state.status.ok()) state.before = ListOf(call).Take(state.at);
  return state;
}

absl::Status ResidentCache::CheckTokens(const LayerCall& call, const NewTokens& tokens,
                                        Prepared& prepared) {
  LayerState state;
  absl::Status place = CheckPlace(call, state);
  prepared.length = state.length;
  if (!place.ok()) return place;
  PageList& list = ListOf(call);
  prepared.reserved_pages = list.reserved_pages();
  for (const TokenRange& range : {tokens.visible.first, tokens.visible.recent}) {
    if (!list.evicted().Overlaps(range)) continue;
    return Fail(Reason::kEvicted, absl::StatusCode::kFailedPrecondition,
                absl::StrCat("a row sees tokens that the layer has evicted: ", list.evicted().begin,
                             " to ", list.evicted().end));
  }
  if (state.at == state.length) return Reserve(list, call.count);
  prepared.applied_before = call.count > 0;
  if (list.Holds(state.at, call.count, tokens.keys, tokens.values)) return absl::OkStatus();
  return Fail(
      Reason::kConflict, absl::StatusCode::kAborted,
      absl::StrCat("the layer has other tokens from ", state.at, " to ", state.at + call.count));
}

ResidentCache::Prepared ResidentCache::Prepare(const LayerCall& call, const NewTokens& tokens) {
  Prepared prepared;
  prepared.status = CheckTokens(call, tokens, prepared);
  return prepared;
}

AppendResult ResidentCache::Append(const LayerCall& call, const NewTokens& tokens,
                                   const Prepared& prepared) {
  PageList& list = ListOf(call);
  const Memory before = MemoryOf(list);
  const int64_t at = call.at.value_or(list.length());
  if (call.count > 0 && !prepared.applied_before) {
    list.Append(call.count, tokens.keys, tokens.values);
    truncated_to_.reset();
    Evict(call, tokens, list);
  }
  Settle(before, list);
  return {.status = {},
          .length = list.length(),
          .applied_before = prepared.applied_before,
          .snapshot = list.Take(at + call.count)};
}

void ResidentCache::Cancel(const LayerCall& call, const Prepared& prepared) {
  PageList& list = ListOf(call);
  const Memory before = MemoryOf(list);
  list.KeepReserved(prepared.reserved_pages);
  Settle(before, list);
}

// Frees what neither a row of the call nor a later one can see.
void ResidentCache::Evict(const LayerCall& call, const NewTokens& tokens, PageList& list) const {
  const int64_t at = list.length() - call.count;
  const int64_t row = std::min(at, tokens.first_row.value_or(at));
  list.Evict(UnseenFrom(row, shapes_[static_cast<size_t>(call.layer)], spec_.first_position));
}

absl::Status ResidentCache::Fill(int64_t layer, int64_t count, const std::byte* keys,
                                 const std::byte* values) {
  PageList& list = layers_[static_cast<size_t>(layer)];
  RAPT_RETURN_IF_ERROR(Reserve(list, count));
  const Memory before = MemoryOf(list);
  list.Append(count, keys, values);
  Settle(before, list);
  return absl::OkStatus();
}

absl::Status ResidentCache::Skip(int64_t layer, int64_t at, int64_t length) {
  const LayerShape& shape = shapes_[static_cast<size_t>(layer)];
  PageList& list = layers_[static_cast<size_t>(layer)];
  const TokenRange gap = {list.length(), at};
  const TokenRange unseen = UnseenFrom(length, shape, spec_.first_position);
  const bool is_whole = gap.begin % kPageTokens == 0 && gap.end % kPageTokens == 0;
  if (!is_whole || gap.begin < unseen.begin || gap.end > unseen.end || !list.evicted().empty()) {
    const std::string allowed =
        unseen.empty() ? "the layer evicts none"
                       : absl::StrCat("one range of multiples of ", kPageTokens, " within ",
                                      unseen.begin, " to ", unseen.end, " may be");
    return Invalid("tokens ", gap.begin, " to ", gap.end, " of layer ", layer, " are missing; ",
                   allowed);
  }
  // Tables without pages would escape the quota. More than the arena can have is not charged;
  // PageList::Skip() refuses it.
  const int64_t tables = at > context_.arena.capacity_bytes()
                             ? 0
                             : (gap.end - gap.begin) / kPageTokens * kPageTableBytes;
  RAPT_RETURN_IF_ERROR(ChargeOwner(tables));
  charged_tables_ += tables;
  absl::Status status = list.Skip(gap.end - gap.begin);
  if (status.ok()) return status;
  return Fail(Reason::kPages, status.code(), status.message());
}

ResidentCache::Locks::Locks(absl::Span<const std::shared_ptr<ResidentCache>> caches)
    ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (const auto& cache : caches) {
    if (cache != nullptr) caches_.push_back(cache.get());
  }
  std::sort(caches_.begin(), caches_.end());
  caches_.erase(std::unique(caches_.begin(), caches_.end()), caches_.end());
  for (ResidentCache* cache : caches_) cache->mutex_.Lock();
}

ResidentCache::Locks::~Locks() ABSL_NO_THREAD_SAFETY_ANALYSIS {
  for (ResidentCache* cache : caches_) cache->mutex_.Unlock();
}

}  // namespace rapt::cache
