#include "rapt/sharded_cache.h"

#include <algorithm>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/check.h"
#include "base/checked_math.h"
#include "base/invalid.h"
#include "base/status_macros.h"
#include "base/thread_pool.h"
#include "client/cpp/cache_calls.h"
#include "client/cpp/codec.h"
#include "client/cpp/deadline.h"
#include "client/cpp/partial_results.h"
#include "client/cpp/reason.h"

namespace rapt::client {
namespace {

constexpr size_t kMaxShards = 256;
constexpr int64_t kUnlimited = std::numeric_limits<int64_t>::max();

int64_t RowsOf(const TensorView& view) { return view.shape.empty() ? 0 : view.shape[0]; }

int64_t RowsOf(const std::optional<TensorView>& view) { return view ? RowsOf(*view) : 0; }

// Returns `count` rows of the first axis. REQUIRES: the view has them, and CheckData() is OK.
TensorView RowsFrom(const TensorView& view, int64_t begin, int64_t count) {
  const size_t row_bytes = view.data.size() / static_cast<size_t>(view.shape[0]);
  TensorView rows = view;
  rows.shape[0] = count;
  rows.data = view.data.subspan(static_cast<size_t>(begin) * row_bytes,
                                static_cast<size_t>(count) * row_bytes);
  return rows;
}

// InvalidArgument, with `name`, unless it is [tokens, heads, size].
absl::Status CheckTokens(const char* name, const TensorView& view) {
  if (view.shape.size() == 3) return CheckData(name, view);
  return Invalid(name, " has shape ", ToString(view.shape), "; it must be [tokens, heads, size]");
}

// Returns the number of new tokens. InvalidArgument if k and v differ in it.
absl::StatusOr<int64_t> TokensOf(const TensorView& k, const TensorView& v) {
  RAPT_RETURN_IF_ERROR(CheckTokens("k", k));
  RAPT_RETURN_IF_ERROR(CheckTokens("v", v));
  if (RowsOf(k) == RowsOf(v)) return RowsOf(k);
  return Invalid("k has ", RowsOf(k), " tokens and v has ", RowsOf(v), "; they must have as many");
}

absl::Status CheckShards(absl::Span<const Shard> shards) {
  if (shards.empty() || shards.size() > kMaxShards) {
    return Invalid("shards has ", shards.size(), " entries; it must have 1 to ", kMaxShards);
  }
  for (size_t n = 0; n < shards.size(); ++n) {
    const int64_t least = n + 1 == shards.size() ? 0 : 1;
    if (shards[n].server == nullptr) {
      return Invalid("shards[", n, "].server is null");
    }
    if (shards[n].tokens < least) {
      return Invalid("shards[", n, "].tokens is ", shards[n].tokens, "; it must be at least ",
                     least);
    }
  }
  return absl::OkStatus();
}

// Tokens [begin, begin + count) of a call, for one shard.
struct Piece {
  size_t shard = 0;
  int64_t begin = 0;
  int64_t count = 0;
};

// The call of one shard, for a partial result. Its rows stand at their place in the context.
CacheAttendCall PartOf(const CacheAttendCall& call, const Piece& piece, int64_t first_row,
                       DType dtype) {
  CacheAttendCall part = call;
  part.k.reset();
  part.v.reset();
  if (piece.count > 0) {
    part.k = RowsFrom(*call.k, piece.begin, piece.count);
    part.v = RowsFrom(*call.v, piece.begin, piece.count);
  }
  part.position = first_row;
  part.wants_lse = true;
  part.output = dtype;
  part.partial_success = false;
  return part;
}

// The tensors that shards have returned are what the first of them is.
absl::Status CheckPartial(const CacheAttendResult& partial, DType dtype, const Shape& shape) {
  const Tensor& y = partial.y;
  const Tensor& lse = *partial.lse;
  const bool is_right = y.dtype() == dtype && lse.dtype() == dtype && y.shape() == shape &&
                        shape.size() == 3 && lse.shape() == (Shape{shape[0], shape[1]});
  if (is_right) return absl::OkStatus();
  return MalformedResponse(absl::StrCat("y is ", NameOf(y.dtype()), " ", ToString(y.shape()),
                                        ", lse is ", NameOf(lse.dtype()), " ",
                                        ToString(lse.shape())));
}

template <typename Real>
ShardedResult Merge(absl::Span<const CacheAttendResult> partials) {
  const Shape& shape = partials[0].y.shape();
  const Shape rows = {shape[0], shape[1]};
  const auto count = static_cast<size_t>(shape[0] * shape[1]);
  const auto size = static_cast<size_t>(shape[2]);
  PartialResults sum(count, size);
  for (const CacheAttendResult& partial : partials) {
    sum.Add(partial.y.values<Real>(), partial.lse->values<Real>());
  }
  std::string y(count * size * sizeof(Real), '\0'), lse(count * sizeof(Real), '\0');
  sum.Write(absl::MakeSpan(reinterpret_cast<Real*>(y.data()), count * size),
            absl::MakeSpan(reinterpret_cast<Real*>(lse.data()), count));
  return {Tensor(DTypeOf<Real>(), shape, std::move(y)),
          Tensor(DTypeOf<Real>(), rows, std::move(lse))};
}

}  // namespace

struct ShardedCache::State {
  struct Part {
    Client* server;
    CacheOptions options;
    Cache cache;  // renews the lease
    int64_t begin;
    int64_t capacity;
    // Tokens of each layer that calls which succeeded have stored. The server may have more.
    std::vector<int64_t> lengths;
    // Tokens of each layer that the shard had before it was lost. Without them the context would be
    // shorter unnoticed.
    std::vector<int64_t> needed;
    // Whether calls have sent tokens of the layer since it was cut. A copy may have such tokens.
    std::vector<bool> sent;

    bool IsFull(size_t layer) const { return lengths[layer] == capacity; }
  };

  State(const CacheOptions& options, size_t shards)
      : cache_options(options), pool(static_cast<int>(shards)) {}

  absl::Status Add(const Shard& shard, const CallOptions& options);
  // Leaves named caches to their leases: they may have existed. The others are closed as usual.
  void Abandon();

  absl::Status CheckLayer(int32_t layer) const;
  int64_t LengthOf(size_t layer) const;
  // FailedPrecondition if a shard lacks tokens of the layer that a later shard follows.
  absl::Status CheckComplete(size_t layer) const;
  enum class Asked { kNone, kWithTokens };
  // The shards that take `count` new tokens, with those that have some if they are asked.
  absl::StatusOr<std::vector<Piece>> Split(size_t layer, int64_t count, Asked asked) const;
  absl::Status CheckFound(const Part& part, const CacheInfo& info) const;

  // The cache of a part as this object knows it, so that a call that is made again says the same.
  Cache Known(const Part& part) const;
  absl::Status Named(size_t shard, const absl::Status& status) const;
  // Runs `body` for the shards at once. Returns the first one's error, which names the shard.
  absl::Status AtOnce(absl::Span<const Piece> pieces,
                      absl::FunctionRef<absl::Status(size_t piece)> body);
  absl::Status Store(absl::Span<const std::vector<CacheTokens>> by_shard,
                     const CallOptions& options);
  // `from` may be null.
  absl::Status Rebuild(size_t shard, Client& server, CacheReader* from, const CallOptions& options);

  const CacheOptions cache_options;
  std::vector<Part> parts;
  ThreadPool pool;
};

absl::Status ShardedCache::State::Add(const Shard& shard, const CallOptions& options) {
  const int64_t begin = parts.empty() ? 0 : parts.back().begin + parts.back().capacity;
  const int64_t capacity = shard.tokens == 0 ? kUnlimited - begin : shard.tokens;
  const std::optional<int64_t> first = CheckedAdd(cache_options.first_position, begin);
  if (!first || !CheckedAdd(begin, capacity)) {
    return Invalid("the tokens of all shards, with first_position, exceed 64 bits");
  }
  CacheOptions cache = cache_options;
  if (!cache.name.empty()) absl::StrAppend(&cache.name, "/", parts.size());
  cache.first_position = *first;
  cache.reserve_tokens = std::clamp<int64_t>(cache_options.reserve_tokens - begin, 0, capacity);
  absl::StatusOr<Cache> made = CreateCache(*shard.server, cache, options);
  if (!made.ok()) {
    absl::Status named(made.status().code(),
                       absl::StrCat("shard ", parts.size(), ": ", made.status().message()));
    SetReason(ReasonOf(made.status()), named);
    return named;
  }
  std::vector<int64_t> lengths = made->lengths(), needed(lengths.size());
  std::vector<bool> sent(lengths.size());
  parts.push_back({shard.server, std::move(cache), *std::move(made), begin, capacity,
                   std::move(lengths), std::move(needed), std::move(sent)});
  for (int64_t length : parts.back().lengths) {
    if (length <= capacity) continue;
    return Named(parts.size() - 1, absl::FailedPreconditionError(
                                       absl::StrCat("the cache of this name has ", length,
                                                    " tokens; the shard holds ", capacity)));
  }
  return absl::OkStatus();
}

void ShardedCache::State::Abandon() {
  if (cache_options.name.empty()) return;
  for (Part& part : parts) part.cache.Release();
  parts.clear();
}

absl::Status ShardedCache::State::CheckLayer(int32_t layer) const {
  const size_t layers = parts[0].lengths.size();
  if (layer >= 0 && static_cast<size_t>(layer) < layers) return absl::OkStatus();
  return Invalid("layer is ", layer, "; the caches have ", layers, " layers");
}

int64_t ShardedCache::State::LengthOf(size_t layer) const {
  int64_t length = 0;
  for (const Part& part : parts) {
    length += part.lengths[layer];
    if (!part.IsFull(layer)) break;
  }
  return length;
}

absl::Status ShardedCache::State::CheckComplete(size_t layer) const {
  bool has_later = false;
  for (size_t n = parts.size(); n-- > 0;) {
    const Part& part = parts[n];
    const int64_t needed = has_later ? part.capacity : part.needed[layer];
    if (part.lengths[layer] < needed) {
      return Named(n, absl::FailedPreconditionError(absl::StrCat(
                          "it has ", part.lengths[layer], " of ", needed, " tokens of layer ",
                          layer, "; append the others by Fill()")));
    }
    has_later = has_later || part.lengths[layer] > 0;
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<Piece>> ShardedCache::State::Split(size_t layer, int64_t count,
                                                              Asked asked) const {
  std::vector<Piece> pieces;
  int64_t begin = 0;
  for (size_t n = 0; n < parts.size(); ++n) {
    const int64_t room = parts[n].capacity - parts[n].lengths[layer];
    const int64_t taken = std::min(room, count - begin);
    const bool answers = asked == Asked::kWithTokens && parts[n].lengths[layer] > 0;
    if (taken > 0 || answers) pieces.push_back({n, begin, taken});
    begin += taken;
  }
  if (begin == count) return pieces;
  return absl::ResourceExhaustedError(absl::StrCat("the shards have room for ", begin, " of ",
                                                   count, " new tokens of layer ", layer));
}

Cache ShardedCache::State::Known(const Part& part) const {
  CacheInfo known;
  known.id = part.cache.id();
  known.shapes = part.cache.shapes();
  known.dtype = part.cache.dtype();
  known.lengths = part.lengths;
  known.generation = part.cache.generation();
  return BorrowCache(*part.server, known);
}

absl::Status ShardedCache::State::Named(size_t shard, const absl::Status& status) const {
  if (status.ok()) return status;
  const Part& part = parts[shard];
  const std::string end = part.begin + part.capacity == kUnlimited
                              ? "on"
                              : absl::StrCat("to ", part.begin + part.capacity - 1);
  absl::Status named(status.code(),
                     absl::StrCat("shard ", shard, ", tokens ", part.begin, " ", end, ", cache ",
                                  part.cache.id(), ": ", status.message()));
  SetReason(ReasonOf(status), named);
  return named;
}

absl::Status ShardedCache::State::AtOnce(absl::Span<const Piece> pieces,
                                         absl::FunctionRef<absl::Status(size_t piece)> body) {
  std::vector<absl::Status> statuses(pieces.size());
  pool.ParallelFor(static_cast<int64_t>(pieces.size()), [&](int64_t n, int) {
    statuses[static_cast<size_t>(n)] = body(static_cast<size_t>(n));
  });
  for (size_t n = 0; n < pieces.size(); ++n) {
    if (!statuses[n].ok()) return Named(pieces[n].shard, statuses[n]);
  }
  return absl::OkStatus();
}

absl::Status ShardedCache::State::Store(absl::Span<const std::vector<CacheTokens>> by_shard,
                                        const CallOptions& options) {
  std::vector<Piece> pieces;
  for (size_t n = 0; n < by_shard.size(); ++n) {
    if (!by_shard[n].empty()) pieces.push_back({.shard = n});
    for (const CacheTokens& tokens : by_shard[n]) {
      parts[n].sent[static_cast<size_t>(tokens.layer)] = true;
    }
  }
  RAPT_RETURN_IF_ERROR(AtOnce(pieces, [&](size_t n) {
    const size_t shard = pieces[n].shard;
    return Known(parts[shard]).Append(by_shard[shard], options).status();
  }));
  for (const Piece& piece : pieces) {
    for (const CacheTokens& tokens : by_shard[piece.shard]) {
      parts[piece.shard].lengths[static_cast<size_t>(tokens.layer)] += RowsOf(tokens.k);
    }
  }
  return absl::OkStatus();
}

absl::Status ShardedCache::State::CheckFound(const Part& part, const CacheInfo& info) const {
  if (info.shapes != part.cache.shapes() || info.dtype != part.cache.dtype() ||
      info.storage != part.options.storage) {
    return Invalid("the cache has other layers, head sizes, type or storage than the shard");
  }
  if (info.first_position != part.options.first_position) {
    return Invalid("the cache begins at position ", info.first_position, "; the shard begins at ",
                   part.options.first_position);
  }
  const int64_t longest = *std::max_element(info.lengths.begin(), info.lengths.end());
  if (longest <= part.capacity) return absl::OkStatus();
  return Invalid("the cache has ", longest, " tokens; the shard holds ", part.capacity);
}

absl::Status ShardedCache::State::Rebuild(size_t shard, Client& server, CacheReader* from,
                                          const CallOptions& options) {
  if (shard >= parts.size()) {
    return Invalid("shard is ", shard, "; there are ", parts.size());
  }
  Part& part = parts[shard];
  const Deadline deadline = CacheCalls::Of(server).calls().DeadlineOf(options);
  const auto in_time = [&] {
    return CallOptions{.timeout = deadline.left(), .stop = options.stop};
  };
  absl::StatusOr<Cache> made =
      from == nullptr ? CreateCache(server, part.options, in_time())
                      : ImportCache(server, *from, {.name = part.options.name}, in_time());
  if (!made.ok()) return Named(shard, made.status());
  const bool is_same = made->id() == part.cache.id();
  const absl::StatusOr<CacheInfo> info = made->Refresh(in_time());
  absl::Status status = info.status();
  if (status.ok()) status = CheckFound(part, *info);
  if (!status.ok()) {
    // A cache that was found by its name may have existed.
    if (is_same || (from == nullptr && !part.options.name.empty())) made->Release();
    return Named(shard, status);
  }
  if (is_same) part.cache.Release();
  part.cache = *std::move(made);
  part.server = &server;
  for (size_t layer = 0; layer < part.needed.size(); ++layer) {
    int64_t& needed = part.needed[layer];
    needed = std::max(needed, part.lengths[layer]);
    // Tokens of a call that failed do not count: made again, it sends them again.
    const bool is_known = needed > 0 || part.sent[layer];
    part.lengths[layer] = is_known ? std::min(info->lengths[layer], needed) : info->lengths[layer];
  }
  return absl::OkStatus();
}

ShardedCache::ShardedCache(std::unique_ptr<State> state) : state_(std::move(state)) {}
ShardedCache::~ShardedCache() = default;
ShardedCache::ShardedCache(ShardedCache&& other) noexcept = default;
ShardedCache& ShardedCache::operator=(ShardedCache&& other) noexcept = default;

std::vector<int64_t> ShardedCache::lengths() const {
  std::vector<int64_t> lengths;
  for (size_t layer = 0; layer < state_->parts[0].lengths.size(); ++layer) {
    lengths.push_back(state_->LengthOf(layer));
  }
  return lengths;
}

size_t ShardedCache::shards() const { return state_->parts.size(); }

const Cache& ShardedCache::cache(size_t shard) const {
  RAPT_CHECK(shard < shards(), "the shard exists");
  return state_->parts[shard].cache;
}

absl::Status ShardedCache::Append(absl::Span<const CacheTokens> parts, const CallOptions& options) {
  if (parts.empty()) return Invalid("parts has 0 entries; it must have 1 to 1024");
  std::vector<std::vector<CacheTokens>> by_shard(state_->parts.size());
  for (const CacheTokens& part : parts) {
    RAPT_RETURN_IF_ERROR(state_->CheckLayer(part.layer));
    const auto layer = static_cast<size_t>(part.layer);
    RAPT_RETURN_IF_ERROR(state_->CheckComplete(layer));
    RAPT_ASSIGN_OR_RETURN(const int64_t count, TokensOf(part.k, part.v));
    RAPT_ASSIGN_OR_RETURN(const std::vector<Piece> pieces,
                          state_->Split(layer, count, State::Asked::kNone));
    for (const Piece& piece : pieces) {
      by_shard[piece.shard].push_back({part.layer, RowsFrom(part.k, piece.begin, piece.count),
                                       RowsFrom(part.v, piece.begin, piece.count)});
    }
  }
  return state_->Store(by_shard, options);
}

absl::StatusOr<ShardedResult> ShardedCache::Attend(const CacheAttendCall& call,
                                                   const CallOptions& options) {
  RAPT_RETURN_IF_ERROR(state_->CheckLayer(call.layer));
  const auto layer = static_cast<size_t>(call.layer);
  RAPT_RETURN_IF_ERROR(state_->CheckComplete(layer));
  const DType dtype =
      state_->parts[0].cache.dtype() == DType::kFloat64 ? DType::kFloat64 : DType::kFloat32;
  if (call.output && *call.output != dtype) {
    return Invalid("output is ", NameOf(*call.output), "; it must be ", NameOf(dtype),
                   " or absent, as results are merged");
  }
  const TensorView none{.shape = {0, 0, 0}};
  RAPT_ASSIGN_OR_RETURN(const int64_t count,
                        TokensOf(call.k.value_or(none), call.v.value_or(none)));
  const int64_t rows = RowsOf(call.q);
  RAPT_ASSIGN_OR_RETURN(
      std::vector<Piece> pieces,
      state_->Split(layer, count, rows > 0 ? State::Asked::kWithTokens : State::Asked::kNone));
  // A context without tokens is asked of the first shard.
  if (pieces.empty()) pieces.push_back({});
  for (const Piece& piece : pieces) {
    if (piece.count > 0) state_->parts[piece.shard].sent[layer] = true;
  }

  const int64_t first_row = call.position.value_or(state_->cache_options.first_position +
                                                   state_->LengthOf(layer) + count - rows);
  std::vector<CacheAttendResult> partials(pieces.size());
  absl::Status status = state_->AtOnce(pieces, [&](size_t n) {
    const Piece& piece = pieces[n];
    CacheAttendCall part = PartOf(call, piece, first_row, dtype);
    if (n > 0) part.head_sink.reset();  // one more key, which counts once
    RAPT_ASSIGN_OR_RETURN(partials[n],
                          state_->Known(state_->parts[piece.shard]).Attend(part, options));
    return absl::OkStatus();
  });
  const Shape& shape = partials[0].y.shape();
  for (size_t n = 0; n < partials.size() && status.ok(); ++n) {
    status = state_->Named(pieces[n].shard, CheckPartial(partials[n], dtype, shape));
  }
  if (!status.ok()) return status;
  for (const Piece& piece : pieces) state_->parts[piece.shard].lengths[layer] += piece.count;
  return dtype == DType::kFloat64 ? Merge<double>(partials) : Merge<float>(partials);
}

absl::Status ShardedCache::Truncate(int64_t length, const CallOptions& options) {
  if (length < 0) return Invalid("length is ", length, "; it must be at least 0");
  const std::vector<int64_t> lengths = this->lengths();
  const int64_t shortest = *std::min_element(lengths.begin(), lengths.end());
  if (length > shortest) {
    return absl::OutOfRangeError(
        absl::StrCat("length is ", length, "; a layer has ", shortest, " tokens"));
  }
  // A call that failed may have left tokens in any shard that ends later.
  std::vector<Piece> pieces;
  for (size_t n = 0; n < state_->parts.size(); ++n) {
    if (state_->parts[n].begin + state_->parts[n].capacity > length) pieces.push_back({.shard = n});
  }
  return state_->AtOnce(pieces, [&](size_t n) {
    State::Part& part = state_->parts[pieces[n].shard];
    absl::Status cut = part.cache.Truncate(std::max<int64_t>(0, length - part.begin), options);
    if (cut.ok()) {
      part.lengths = part.cache.lengths();
      part.needed.assign(part.lengths.size(), 0);
      part.sent.assign(part.lengths.size(), false);
    }
    return cut;
  });
}

absl::Status ShardedCache::Rebuild(size_t shard, Client& server, const CallOptions& options) {
  return state_->Rebuild(shard, server, nullptr, options);
}

absl::Status ShardedCache::Rebuild(size_t shard, Client& server, CacheReader& from,
                                   const CallOptions& options) {
  return state_->Rebuild(shard, server, &from, options);
}

absl::Status ShardedCache::Fill(size_t shard, absl::Span<const CacheTokens> parts,
                                const CallOptions& options) {
  if (shard >= state_->parts.size()) {
    return Invalid("shard is ", shard, "; there are ", state_->parts.size());
  }
  const State::Part& to = state_->parts[shard];
  for (const CacheTokens& part : parts) {
    RAPT_RETURN_IF_ERROR(state_->CheckLayer(part.layer));
    RAPT_ASSIGN_OR_RETURN(const int64_t count, TokensOf(part.k, part.v));
    const int64_t room = to.capacity - to.lengths[static_cast<size_t>(part.layer)];
    if (count > room) {
      return state_->Named(
          shard, absl::OutOfRangeError(absl::StrCat("it has room for ", room, " of ", count,
                                                    " new tokens of layer ", part.layer)));
    }
  }
  std::vector<std::vector<CacheTokens>> by_shard(state_->parts.size());
  by_shard[shard].assign(parts.begin(), parts.end());
  return state_->Store(by_shard, options);
}

absl::StatusOr<ShardedCache> CreateShardedCache(absl::Span<const Shard> shards,
                                                const CacheOptions& cache,
                                                const CallOptions& options) {
  absl::Status status = CheckShards(shards);
  if (!status.ok()) return status;
  auto state = std::make_unique<ShardedCache::State>(cache, shards.size());
  for (const Shard& shard : shards) {
    status = state->Add(shard, options);
    if (status.ok()) continue;
    state->Abandon();
    return status;
  }
  return ShardedCache(std::move(state));
}

}  // namespace rapt::client
