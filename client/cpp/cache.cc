#include "rapt/cache.h"

#include <algorithm>
#include <limits>
#include <random>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/check.h"
#include "base/invalid.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "client/cpp/cache_calls.h"
#include "client/cpp/cache_codec.h"
#include "client/cpp/codec.h"

namespace rapt::client {
namespace {

using Clock = CacheLease::Clock;
using Stub = v1::CacheService::Stub;

constexpr char kAppend[] = "/rapt.v1.CacheService/Append";
constexpr char kCachedAttendMethod[] = "/rapt.v1.CacheService/Attend";
constexpr char kCachedDiagnoseMethod[] = "/rapt.v1.CacheService/Diagnose";

// How long a destructor waits for the server.
constexpr std::chrono::seconds kCloseTimeout{1};

constexpr char kEmpty[] = "the cache was closed, released or moved from";

absl::Status Empty() { return absl::FailedPreconditionError(kEmpty); }

absl::StatusOr<FoundCaches> DecodeFound(const absl::StatusOr<v1::Caches>& caches) {
  if (!caches.ok()) return caches.status();
  return Decode(*caches);
}

absl::StatusOr<CacheInfo> DecodeOne(const absl::StatusOr<v1::Caches>& caches) {
  RAPT_ASSIGN_OR_RETURN(FoundCaches found, DecodeFound(caches));
  if (found.caches.size() == 1) return std::move(found.caches.front());
  return absl::InternalError("malformed response from server: not the one cache");
}

// A cache that the server does not close now expires.
void CloseNow(UnaryCalls& calls, const v1::Ids& ids) {
  calls.Call(&Stub::Close, ids, {.timeout = kCloseTimeout}, {.max_attempts = 1})
      .status()
      .IgnoreError();
}

// Internal for another number of results of an update.
absl::Status CheckResults(absl::string_view list, int got, int wanted) {
  if (got == wanted) return absl::OkStatus();
  return MalformedResponse(absl::StrCat(got, " results of ", wanted, " ", list));
}

// Returns the first axis. InvalidArgument if it is beyond what a message can say.
absl::StatusOr<int32_t> RowsOf(const char* name, const std::optional<TensorView>& view) {
  const int64_t rows = view && !view->shape.empty() ? view->shape[0] : 0;
  if (rows >= 0 && rows <= std::numeric_limits<int32_t>::max()) return static_cast<int32_t>(rows);
  return Invalid(name, " has ", rows, " rows; it must have 0 to 2147483647");
}

constexpr char kDrawn[] = "drawn-";

// The item of a call on one cache.
absl::StatusOr<CacheItem> ItemOf(Cache& cache, const CacheAttendCall& call) {
  RAPT_ASSIGN_OR_RETURN(const int32_t rows, RowsOf("q", call.q));
  RAPT_ASSIGN_OR_RETURN(const int32_t new_tokens, RowsOf("k", call.k));
  return CacheItem{&cache, rows, new_tokens, call.position};
}

}  // namespace

std::string DrawName() {
  std::random_device random;
  return absl::StrFormat("%s%08x%08x%08x%08x", kDrawn, random(), random(), random(), random());
}

bool IsDrawn(absl::string_view name) { return absl::StartsWith(name, kDrawn); }

CacheCalls::CacheCalls(UnaryCalls& calls)
    : calls_(calls),
      renewals_([this](const std::vector<std::string>& ids, std::chrono::nanoseconds timeout,
                       std::stop_token stop) -> absl::StatusOr<std::vector<std::string>> {
        const auto renewed = calls_.Call(&Stub::Renew, EncodeIds(ids),
                                         {.timeout = timeout, .stop = std::move(stop)});
        if (absl::IsNotFound(renewed.status())) return ids;
        if (!renewed.ok()) return renewed.status();
        std::vector<std::string> missing;
        for (const v1::Missing& cache : renewed->missing()) missing.push_back(cache.cache());
        return missing;
      }) {}

// What a handle knows of its cache. Thread-safe.
class Cache::State {
 public:
  enum class Ownership { kOwned, kBorrowed };

  // `counted_from`: before the call that made the cache.
  State(CacheCalls& calls, const CacheInfo& info, Ownership ownership,
        Clock::time_point counted_from)
      : calls_(calls),
        shapes_(info.shapes),
        dtype_(info.dtype),
        ownership_(ownership),
        lease_(info.id, info.lease, counted_from),
        lengths_(info.lengths),
        generation_(info.generation) {
    if (ownership_ == Ownership::kOwned) calls_.renewals().Add(lease_);
  }

  ~State() {
    if (ownership_ == Ownership::kOwned) calls_.renewals().Remove(lease_);
  }

  CacheCalls& calls() const { return calls_; }
  UnaryCalls& unary() const { return calls_.calls(); }
  const std::string& id() const { return lease_.id; }
  const std::vector<LayerShape>& shapes() const { return shapes_; }
  DType dtype() const { return dtype_; }
  bool is_owned() const { return ownership_ == Ownership::kOwned; }
  v1::Ids ids() const { return EncodeIds({id()}); }

  std::vector<int64_t> lengths() const {
    MutexLock lock(mutex_);
    return lengths_;
  }

  uint64_t generation() const {
    MutexLock lock(mutex_);
    return generation_;
  }

  v1::ForkRequest ForkOf(const ForkOptions& fork) const {
    v1::ForkRequest request;
    request.set_cache(id());
    request.set_generation(generation());
    if (fork.length) request.set_length(*fork.length);
    request.set_name(fork.name.empty() ? DrawName() : fork.name);
    request.set_reserve_tokens(fork.reserve_tokens);
    request.set_lease_ms(fork.lease.count());
    return request;
  }

  v1::TruncateRequest TruncationTo(int64_t length) const {
    v1::TruncateRequest request;
    request.set_cache(id());
    request.set_length(length);
    request.set_generation(generation());
    return request;
  }

  // InvalidArgument for a layer that the cache does not have.
  absl::StatusOr<KnownItem> At(int32_t layer) const {
    MutexLock lock(mutex_);
    if (layer < 0 || static_cast<size_t>(layer) >= lengths_.size()) {
      return Invalid("layer is ", layer, "; the cache has ", lengths_.size(), " layers");
    }
    return KnownItem{id(), generation_, lengths_[static_cast<size_t>(layer)]};
  }

  // A call that began at `start` has left the layer with `length` tokens.
  void Appended(int32_t layer, int64_t length, Clock::time_point start) {
    MutexLock lock(mutex_);
    lengths_[static_cast<size_t>(layer)] = length;
    lease_.Renewed(start);
  }

  void Renewed(Clock::time_point start) { lease_.Renewed(start); }

  void Take(const CacheInfo& info) {
    MutexLock lock(mutex_);
    lengths_ = info.lengths;
    generation_ = info.generation;
  }

 private:
  CacheCalls& calls_;
  const std::vector<LayerShape> shapes_;
  const DType dtype_;
  const Ownership ownership_;
  CacheLease lease_;

  mutable Mutex mutex_;
  std::vector<int64_t> lengths_ ABSL_GUARDED_BY(mutex_);
  uint64_t generation_ ABSL_GUARDED_BY(mutex_);
};

Cache::Cache(std::unique_ptr<State> state) : state_(std::move(state)) {}

Cache::Cache(Cache&& other) noexcept = default;

Cache& Cache::operator=(Cache&& other) noexcept {
  Cache(std::move(other)).state_.swap(state_);
  return *this;
}

Cache::~Cache() {
  if (state_ != nullptr && state_->is_owned()) CloseNow(state_->unary(), state_->ids());
}

const std::string& Cache::id() const {
  RAPT_CHECK(state_ != nullptr, kEmpty);
  return state_->id();
}

const std::vector<LayerShape>& Cache::shapes() const {
  RAPT_CHECK(state_ != nullptr, kEmpty);
  return state_->shapes();
}

DType Cache::dtype() const {
  RAPT_CHECK(state_ != nullptr, kEmpty);
  return state_->dtype();
}

std::vector<int64_t> Cache::lengths() const {
  RAPT_CHECK(state_ != nullptr, kEmpty);
  return state_->lengths();
}

uint64_t Cache::generation() const {
  RAPT_CHECK(state_ != nullptr, kEmpty);
  return state_->generation();
}

absl::StatusOr<CacheItemResult> Cache::Append(int32_t layer, const TensorView& k,
                                              const TensorView& v, const CallOptions& options) {
  RAPT_ASSIGN_OR_RETURN(auto results, Append({CacheTokens{layer, k, v}}, options));
  return std::move(results.front());
}

absl::StatusOr<std::vector<CacheItemResult>> Cache::Append(absl::Span<const CacheTokens> parts,
                                                           const CallOptions& options) {
  if (state_ == nullptr) return Empty();
  UnaryCalls& calls = state_->unary();
  const Deadline deadline = calls.DeadlineOf(options);
  const Clock::time_point start = Clock::now();
  std::vector<KnownItem> known;
  for (const CacheTokens& part : parts) {
    RAPT_ASSIGN_OR_RETURN(KnownItem item, state_->At(part.layer));
    known.push_back(std::move(item));
  }
  RAPT_ASSIGN_OR_RETURN(const auto request,
                        EncodeAppend(parts, known, calls.options().max_message_bytes));
  RAPT_ASSIGN_OR_RETURN(
      const auto response,
      calls.Send<v1::AppendResponse>(kAppend, request, options, deadline, calls.options().retries));
  RAPT_ASSIGN_OR_RETURN(auto results, Decode(parts.size(), response));
  for (size_t n = 0; n < parts.size(); ++n) {
    const Shape& shape = parts[n].k.shape;
    state_->Appended(parts[n].layer, known[n].at + (shape.empty() ? 0 : shape[0]), start);
  }
  return results;
}

absl::StatusOr<CacheAttendResult> Cache::Attend(const CacheAttendCall& call,
                                                const CallOptions& options) {
  RAPT_ASSIGN_OR_RETURN(const CacheItem item, ItemOf(*this, call));
  CacheAttendCall batch = call;
  batch.position.reset();
  return AttendCaches({item}, batch, options);
}

absl::StatusOr<CacheAttendResult> AttendCaches(absl::Span<const CacheItem> items,
                                               const CacheAttendCall& call,
                                               const CallOptions& options) {
  if (items.empty()) {
    return Invalid("items has 0 entries; it must have 1 to 1024");
  }
  if (call.position) {
    return Invalid("position is set in the call; a batch has one in each item");
  }
  const Clock::time_point start = Clock::now();
  std::vector<KnownItem> known;
  CacheCalls* caches = nullptr;
  for (size_t n = 0; n < items.size(); ++n) {
    Cache::State* const state = items[n].cache == nullptr ? nullptr : items[n].cache->state_.get();
    if (state == nullptr) {
      return absl::FailedPreconditionError(absl::StrCat("items[", n, "]: ", kEmpty));
    }
    if (caches == nullptr) caches = &state->calls();
    if (caches != &state->calls()) {
      return Invalid("items[", n, "]: the cache is of another client; all must be of one");
    }
    RAPT_ASSIGN_OR_RETURN(KnownItem item, state->At(call.layer));
    known.push_back(std::move(item));
  }
  UnaryCalls& calls = caches->calls();
  const Deadline deadline = calls.DeadlineOf(options);
  RAPT_ASSIGN_OR_RETURN(const auto request,
                        EncodeCachedAttend(items, known, call, calls.options().max_message_bytes));
  RAPT_ASSIGN_OR_RETURN(auto response,
                        calls.Send<v1::AttendCachedResponse>(kCachedAttendMethod, request, options,
                                                             deadline, calls.options().retries));
  RAPT_ASSIGN_OR_RETURN(auto result, Decode(items.size(), call, std::move(response)));
  for (size_t n = 0; n < items.size(); ++n) {
    if (!result.items[n].status.ok()) continue;
    Cache::State& state = *items[n].cache->state_;
    if (items[n].new_tokens == 0) {  // others may have appended meanwhile
      state.Renewed(start);
    } else {
      state.Appended(call.layer, known[n].at + items[n].new_tokens, start);
    }
  }
  return result;
}

absl::StatusOr<std::vector<Cache>> UpdateCaches(const CacheChanges& changes,
                                                const CallOptions& options) {
  std::vector<Cache*> caches = changes.forks;
  for (const CacheTruncation& cut : changes.truncates) caches.push_back(cut.cache);
  caches.insert(caches.end(), changes.closes.begin(), changes.closes.end());
  if (caches.empty()) return Invalid("there are 0 changes; there must be 1 to 1024");
  for (const Cache* cache : caches) {
    if (cache == nullptr || cache->state_ == nullptr) return Empty();
    if (&cache->state_->calls() != &caches.front()->state_->calls()) {
      return Invalid("cache ", cache->id(), " is of another client; all must be of one");
    }
  }
  v1::UpdateRequest request;
  for (const Cache* cache : changes.forks) *request.add_forks() = cache->state_->ForkOf({});
  for (const auto& [cache, length] : changes.truncates) {
    *request.add_truncates() = cache->state_->TruncationTo(length);
  }
  for (const Cache* cache : changes.closes) request.add_closes(cache->id());
  CacheCalls& calls = caches.front()->state_->calls();
  const Clock::time_point start = Clock::now();
  RAPT_ASSIGN_OR_RETURN(const v1::UpdateResponse response,
                        calls.calls().Call(&Stub::Update, request, options));
  std::vector<Cache> forks;
  absl::Status status = CheckResults("forks", response.forks_size(), request.forks_size());
  for (int n = 0; n < std::min(response.forks_size(), request.forks_size()); ++n) {
    absl::StatusOr<CacheInfo> info = Decode(response.forks(n));
    status.Update(info.status());
    if (!info.ok()) continue;
    info->shapes = changes.forks[static_cast<size_t>(n)]->shapes();
    forks.push_back(OwnCache(calls, *info, start));
  }
  if (status.ok()) {
    status = CheckResults("truncates", response.truncates_size(), request.truncates_size());
  }
  for (int n = 0; n < std::min(response.truncates_size(), request.truncates_size()); ++n) {
    const absl::StatusOr<CacheInfo> info = Decode(response.truncates(n));
    status.Update(info.status());
    if (info.ok()) changes.truncates[static_cast<size_t>(n)].cache->state_->Take(*info);
  }
  if (!status.ok()) {
    v1::Ids made;
    for (Cache& fork : forks) made.add_caches(fork.Release());
    if (!forks.empty()) CloseNow(calls.calls(), made);
    return status;
  }
  for (Cache* cache : changes.closes) {
    if (cache->state_ != nullptr) cache->Release();  // one that was not found is gone as well
  }
  return forks;
}

absl::StatusOr<Diagnosis> Cache::Diagnose(const CacheAttendCall& call, const CallOptions& options) {
  if (state_ == nullptr) return Empty();
  RAPT_ASSIGN_OR_RETURN(const CacheItem item, ItemOf(*this, call));
  RAPT_ASSIGN_OR_RETURN(const KnownItem known, state_->At(call.layer));
  UnaryCalls& calls = state_->unary();
  const Deadline deadline = calls.DeadlineOf(options);
  RAPT_ASSIGN_OR_RETURN(const auto request, EncodeCachedAttend({item}, {known}, call,
                                                               calls.options().max_message_bytes));
  RAPT_ASSIGN_OR_RETURN(const auto response,
                        calls.Send<v1::DiagnoseResponse>(kCachedDiagnoseMethod, request, options,
                                                         deadline, calls.options().retries));
  return Decode(response);
}

absl::StatusOr<Cache> Cache::Fork(const ForkOptions& fork, const CallOptions& options) {
  if (state_ == nullptr) return Empty();
  const Clock::time_point start = Clock::now();
  RAPT_ASSIGN_OR_RETURN(const v1::Cache made,
                        state_->unary().Call(&Stub::Fork, state_->ForkOf(fork), options));
  RAPT_ASSIGN_OR_RETURN(const CacheInfo info, Decode(made));
  return Cache(std::make_unique<State>(state_->calls(), info, State::Ownership::kOwned, start));
}

absl::Status Cache::Truncate(int64_t length, const CallOptions& options) {
  if (state_ == nullptr) return Empty();
  RAPT_ASSIGN_OR_RETURN(
      const v1::Cache cut,
      state_->unary().Call(&Stub::Truncate, state_->TruncationTo(length), options));
  RAPT_ASSIGN_OR_RETURN(const CacheInfo info, Decode(cut));
  state_->Take(info);
  return absl::OkStatus();
}

absl::StatusOr<CacheInfo> Cache::Renew(const CallOptions& options) {
  if (state_ == nullptr) return Empty();
  const Clock::time_point start = Clock::now();
  absl::StatusOr<CacheInfo> info =
      DecodeOne(state_->unary().Call(&Stub::Renew, state_->ids(), options));
  if (info.ok()) state_->Renewed(start);
  return info;
}

absl::StatusOr<CacheInfo> Cache::Refresh(const CallOptions& options) {
  if (state_ == nullptr) return Empty();
  absl::StatusOr<CacheInfo> info =
      DecodeOne(state_->unary().Call(&Stub::Get, state_->ids(), options));
  if (info.ok()) state_->Take(*info);
  return info;
}

absl::Status Cache::Close(const CallOptions& options) {
  if (state_ == nullptr) return Empty();
  const std::unique_ptr<State> state = std::move(state_);
  absl::Status closed = state->unary().Call(&Stub::Close, state->ids(), options).status();
  // It may have been this call that closed it, and whose reply was lost.
  return ReasonOf(closed) == "closed" ? absl::OkStatus() : closed;
}

std::string Cache::Release() {
  std::string released = id();
  state_.reset();
  return released;
}

absl::StatusOr<Cache> CreateCache(Client& client, const CacheOptions& cache,
                                  const CallOptions& options) {
  CacheCalls& calls = CacheCalls::Of(client);
  v1::CreateRequest request = Encode(cache);
  if (cache.name.empty()) request.set_name(DrawName());
  const Clock::time_point start = Clock::now();
  RAPT_ASSIGN_OR_RETURN(const v1::Cache made, calls.calls().Call(&Stub::Create, request, options));
  RAPT_ASSIGN_OR_RETURN(const CacheInfo info, Decode(made));
  return OwnCache(calls, info, start);
}

Cache OwnCache(CacheCalls& calls, const CacheInfo& info, Clock::time_point start) {
  // A cache that existed keeps its lease, which may end sooner than a new one.
  const Clock::time_point counted_from = std::min(start, start + info.expires_in - info.lease);
  return Cache(
      std::make_unique<Cache::State>(calls, info, Cache::State::Ownership::kOwned, counted_from));
}

Cache BorrowCache(Client& client, const CacheInfo& known) {
  return Cache(std::make_unique<Cache::State>(CacheCalls::Of(client), known,
                                              Cache::State::Ownership::kBorrowed, Clock::now()));
}

absl::StatusOr<FoundCaches> GetCaches(Client& client, absl::Span<const std::string> ids,
                                      const CallOptions& options) {
  return DecodeFound(CacheCalls::Of(client).calls().Call(&Stub::Get, EncodeIds(ids), options));
}

absl::StatusOr<FoundCaches> CloseCaches(Client& client, absl::Span<const std::string> ids,
                                        const CallOptions& options) {
  return DecodeFound(CacheCalls::Of(client).calls().Call(&Stub::Close, EncodeIds(ids), options));
}

absl::StatusOr<std::vector<CacheInfo>> ListCaches(Client& client, const std::string& name_prefix,
                                                  const CallOptions& options) {
  CacheCalls& calls = CacheCalls::Of(client);
  const Deadline deadline = calls.calls().DeadlineOf(options);
  v1::ListRequest request;
  request.set_name_prefix(name_prefix);
  std::vector<CacheInfo> caches;
  do {
    const absl::StatusOr<v1::Caches> page = calls.calls().Call(
        &Stub::List, request, {.timeout = deadline.left(), .stop = options.stop});
    RAPT_ASSIGN_OR_RETURN(FoundCaches found, DecodeFound(page));
    std::move(found.caches.begin(), found.caches.end(), std::back_inserter(caches));
    request.set_page_token(page->next_page_token());
  } while (!request.page_token().empty());
  return caches;
}

}  // namespace rapt::client
