#include "server/cache/cache_store.h"

#include <algorithm>

#include "absl/container/flat_hash_set.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/invalid.h"
#include "base/status_macros.h"

namespace rapt::cache {
namespace {

absl::Status Prefixed(const absl::Status& status, absl::string_view prefix) {
  const std::string text = absl::StrCat(prefix, std::string(status.message()));
  const Reason reason = ReasonOf(status);
  return reason == Reason::kNone ? absl::Status(status.code(), text)
                                 : Fail(reason, status.code(), text);
}

absl::Status NameInUse(absl::string_view name) {
  return absl::AlreadyExistsError(absl::StrCat("name: the cache '", name, "' exists"));
}

absl::Status NameOfAnother(absl::string_view name) {
  return absl::AlreadyExistsError(
      absl::StrCat("name: the cache '", name,
                   "' exists with other shapes, type or first_position, or of another fork"));
}

}  // namespace

CacheStore::CacheStore(Options options, Arena& arena, const Clock& clock)
    : options_(std::move(options)),
      clock_(clock),
      context_{.arena = arena, .refusals = refusals_},
      directory_({.caches_per_caller = options_.max_caches_per_caller,
                  .bytes_per_caller = options_.max_bytes_per_caller},
                 refusals_, clock) {
  SetInstance(options_.instance);
}

absl::Status CacheStore::CheckCreating() const {
  if (creating_) return absl::OkStatus();
  return refusals_.Fail(Reason::kDraining, absl::StatusCode::kUnavailable,
                        "the server is draining and makes no new caches");
}

absl::StatusOr<std::chrono::nanoseconds> CacheStore::LeaseOf(
    std::chrono::nanoseconds wanted, std::chrono::nanoseconds otherwise) const {
  if (wanted.count() < 0) {
    return Invalid("lease_ms is ", Milliseconds(wanted), "; it must be at least 0");
  }
  return std::min(wanted.count() == 0 ? otherwise : wanted, options_.max_lease);
}

CacheInfo CacheStore::InfoOf(const Handle& handle, bool counts_shared) const {
  ResidentCache& cache = *handle.cache;
  ResidentCache::State state = cache.Look(counts_shared);
  return {.id = cache.id(),
          .spec = cache.spec(),
          .lengths = std::move(state.lengths),
          .generation = state.generation,
          .expires_in = std::max(std::chrono::nanoseconds(0), handle.expires - clock_.Now()),
          .bytes = state.bytes,
          .shared_bytes = state.shared_bytes};
}

CacheStore::Named CacheStore::FindNamed(const ResidentCache& wanted) {
  const std::string& name = wanted.spec().name;
  if (name.empty()) return std::nullopt;
  const std::optional<Handle> found = directory_.FindNamed(wanted.owner(), name);
  if (!found) return std::nullopt;
  if (found->cache->WasMadeAs(wanted)) return InfoOf(*found);
  return NameOfAnother(name);
}

CacheStore::Named CacheStore::Add(const std::shared_ptr<ResidentCache>& cache) {
  RAPT_ASSIGN_OR_RETURN(const std::optional<Handle> added, directory_.Add(cache));
  if (!added) return std::nullopt;
  return InfoOf(*added);
}

absl::StatusOr<CacheInfo> CacheStore::FindOrAdd(const std::shared_ptr<ResidentCache>& cache) {
  Named named = FindNamed(*cache);
  if (!named.ok()) return named.status();
  if (*named) return **std::move(named);
  RAPT_RETURN_IF_ERROR(cache->TakeMemory());
  named = Add(cache);
  // Another call was first with this name.
  if (named.ok() && !*named) named = FindNamed(*cache);
  if (!named.ok()) return named.status();
  if (*named) return **std::move(named);
  return absl::AbortedError(absl::StrCat("name: the cache '", cache->spec().name,
                                         "' was made and closed by another call meanwhile"));
}

absl::StatusOr<std::shared_ptr<ResidentCache>> CacheStore::NewCache(const std::string& owner,
                                                                    const CacheSpec& spec) {
  RAPT_RETURN_IF_ERROR(CheckCreating());
  RAPT_RETURN_IF_ERROR(Validate(spec));
  RAPT_ASSIGN_OR_RETURN(const auto lease, LeaseOf(spec.lease, options_.default_lease));
  CacheSpec made = spec;
  made.lease = lease;
  return ResidentCache::Make(context_, directory_.AccountOf(owner), directory_.NewId(),
                             std::move(made));
}

absl::StatusOr<CacheInfo> CacheStore::Create(const std::string& owner, const CacheSpec& spec) {
  RAPT_ASSIGN_OR_RETURN(const auto cache, NewCache(owner, spec));
  return FindOrAdd(cache);
}

absl::StatusOr<CacheInfo> CacheStore::Fork(const std::string& owner, const ForkSpec& spec) {
  RAPT_RETURN_IF_ERROR(CheckCreating());
  RAPT_RETURN_IF_ERROR(ValidateName(spec.name));
  RAPT_RETURN_IF_ERROR(ValidateReservation(spec.reserve_tokens));
  const std::optional<Handle> named = directory_.FindNamed(owner, spec.name);
  const auto is_named = [&](std::optional<int64_t> length) {
    return named && named->cache->IsFork(spec.cache, length);
  };
  const bool needs_parent = !spec.length && directory_.Has(owner, spec.cache);
  if (!needs_parent && is_named(spec.length)) return InfoOf(*named);
  RAPT_ASSIGN_OR_RETURN(const Handle parent, directory_.Find(owner, spec.cache, /*renews=*/false));
  if (needs_parent && is_named(parent.cache->ShortestIn(spec.generation))) return InfoOf(*named);
  if (named) return NameOfAnother(spec.name);
  RAPT_RETURN_IF_ERROR(directory_.CheckRoom(owner));
  CacheSpec made = parent.cache->spec();
  RAPT_ASSIGN_OR_RETURN(const auto lease, LeaseOf(spec.lease, made.lease));
  made.name = spec.name;
  made.reserve_tokens = spec.reserve_tokens;
  made.lease = lease;
  RAPT_ASSIGN_OR_RETURN(const auto fork, parent.cache->Fork(directory_.NewId(), std::move(made),
                                                            spec.generation, spec.length));
  return FindOrAdd(fork);
}

absl::StatusOr<CacheInfo> CacheStore::Truncate(const std::string& owner, const std::string& id,
                                               int64_t length, uint64_t generation) {
  RAPT_ASSIGN_OR_RETURN(const Handle handle, directory_.Find(owner, id, /*renews=*/false));
  RAPT_RETURN_IF_ERROR(handle.cache->Truncate(length, generation));
  return InfoOf(handle);
}

absl::StatusOr<CacheSnapshot> CacheStore::Freeze(const std::string& owner, const std::string& id,
                                                 uint64_t generation) {
  RAPT_ASSIGN_OR_RETURN(const Handle handle, directory_.Find(owner, id, /*renews=*/false));
  return handle.cache->Freeze(generation);
}

absl::StatusOr<CacheStore::Draft> CacheStore::StartDraft(const std::string& owner,
                                                         const CacheSpec& spec) {
  RAPT_ASSIGN_OR_RETURN(auto cache, NewCache(owner, spec));
  if (directory_.FindNamed(owner, spec.name)) return NameInUse(spec.name);
  return Draft(*this, std::move(cache));
}

absl::StatusOr<CacheInfo> CacheStore::Publish(Draft draft) {
  const std::shared_ptr<ResidentCache> cache = std::move(draft.cache_);
  RAPT_RETURN_IF_ERROR(CheckCreating());
  RAPT_RETURN_IF_ERROR(cache->TakeMemory());
  RAPT_ASSIGN_OR_RETURN(auto added, Add(cache));
  if (!added) return NameInUse(cache->spec().name);
  return *std::move(added);
}

absl::Status CacheStore::Draft::Append(int64_t layer, int64_t count, const std::byte* keys,
                                       const std::byte* values) {
  RAPT_RETURN_IF_ERROR(store_->CheckCreating());
  return cache_->Fill(layer, count, keys, values);
}

absl::Status CacheStore::Draft::Skip(int64_t layer, int64_t at, int64_t length) {
  return cache_->Skip(layer, at, length);
}

absl::StatusOr<CacheList> CacheStore::ForEach(const std::string& owner,
                                              absl::Span<const std::string> ids, Action action) {
  CacheList list;
  std::vector<Handle> handles;
  absl::Status first;
  const auto found = directory_.FindAll(owner, ids, action == Action::kRenew);
  for (size_t n = 0; n < ids.size(); ++n) {
    if (found[n].ok()) {
      handles.push_back(*found[n]);
      continue;
    }
    first.Update(found[n].status());
    list.missing.push_back({ids[n], ReasonOf(found[n].status())});
  }
  if (handles.empty() && !first.ok()) return first;
  for (const Handle& handle : handles) {
    list.caches.push_back(InfoOf(handle, action == Action::kGet));
  }
  if (action == Action::kClose) directory_.Close(handles);
  return list;
}

absl::StatusOr<CacheList> CacheStore::Get(const std::string& owner,
                                          absl::Span<const std::string> ids) {
  return ForEach(owner, ids, Action::kGet);
}

absl::StatusOr<CacheList> CacheStore::Renew(const std::string& owner,
                                            absl::Span<const std::string> ids) {
  return ForEach(owner, ids, Action::kRenew);
}

absl::StatusOr<CacheList> CacheStore::Close(const std::string& owner,
                                            absl::Span<const std::string> ids) {
  return ForEach(owner, ids, Action::kClose);
}

absl::StatusOr<CacheList> CacheStore::List(const std::string& owner, int64_t page_size,
                                           absl::string_view page_token,
                                           absl::string_view name_prefix) {
  if (page_size < 0 || page_size > kMaxListed) {
    return Invalid("page_size is ", page_size, "; it must be in [0, ", kMaxListed, "]");
  }
  if (page_size == 0) page_size = kMaxListed;
  uint64_t after = 0;
  if (!page_token.empty() && !absl::SimpleAtoi(page_token, &after)) {
    return Invalid("page_token is not one that List returned");
  }
  const CacheDirectory::Page page = directory_.List(owner, after, page_size, name_prefix);
  CacheList list;
  for (const Handle& handle : page.caches) {
    list.caches.push_back(InfoOf(handle, /*counts_shared=*/true));
  }
  if (page.next != 0) list.next_page_token = absl::StrCat(page.next);
  return list;
}

absl::StatusOr<CacheStore::Batch> CacheStore::Open(const std::string& owner,
                                                   absl::Span<const LayerCall> calls,
                                                   std::string field, Leases leases) {
  absl::flat_hash_set<std::pair<absl::string_view, int64_t>> seen;
  std::vector<std::string> ids;
  for (size_t n = 0; n < calls.size(); ++n) {
    ids.push_back(calls[n].cache);
    if (seen.insert({calls[n].cache, calls[n].layer}).second) continue;
    return Invalid(field, "[", n, "]: layer ", calls[n].layer, " of the cache occurs twice");
  }
  Batch batch;
  batch.field_ = std::move(field);
  batch.calls_.assign(calls.begin(), calls.end());
  for (const auto& found : directory_.FindAll(owner, ids, leases == Leases::kRenewed)) {
    const LayerCall& call = calls[batch.states_.size()];
    batch.caches_.push_back(found.ok() ? found->cache : nullptr);
    batch.states_.push_back(found.ok() ? found->cache->Find(call)
                                       : LayerState{.status = found.status()});
  }
  return batch;
}

absl::Status CacheStore::Batch::FirstError(bool partial) const {
  for (size_t n = 0; n < states_.size(); ++n) {
    const absl::Status& status = states_[n].status;
    if (status.ok() || (partial && !absl::IsInvalidArgument(status))) continue;
    return Prefixed(status, absl::StrCat(field_, "[", n, "]: "));
  }
  return absl::OkStatus();
}

absl::StatusOr<std::vector<AppendResult>> CacheStore::Append(const Batch& batch,
                                                             absl::Span<const NewTokens> tokens,
                                                             bool partial) {
  const size_t count = batch.calls_.size();
  const ResidentCache::Locks locks(batch.caches_);
  std::vector<ResidentCache::Prepared> prepared(count);
  absl::Status first;
  for (size_t n = 0; n < count; ++n) {
    const LayerState& state = batch.states_[n];
    prepared[n] = state.status.ok()
                      ? batch.caches_[n]->Prepare(batch.calls_[n], tokens[n])
                      : ResidentCache::Prepared{.status = state.status, .length = state.length};
    if (prepared[n].status.ok()) continue;
    first.Update(Prefixed(prepared[n].status, absl::StrCat(batch.field_, "[", n, "]: ")));
  }
  const bool fails = !partial && !first.ok();
  std::vector<AppendResult> results(count);
  for (size_t n = 0; n < count; ++n) {
    if (!prepared[n].status.ok()) {
      results[n] = {.status = prepared[n].status,
                    .length = prepared[n].length,
                    .applied_before = prepared[n].applied_before};
    } else if (fails) {
      batch.caches_[n]->Cancel(batch.calls_[n], prepared[n]);
    } else {
      results[n] = batch.caches_[n]->Append(batch.calls_[n], tokens[n], prepared[n]);
    }
  }
  if (fails) return first;
  return results;
}

void CacheStore::ExportTo(MetricSink& metrics) {
  const auto number = [](int64_t value) { return static_cast<double>(value); };
  const Arena& arena = context_.arena;
  metrics.AddGauge("rapt_kv_limit_bytes", "Memory for resident keys and values.", {},
                   [=, &arena] { return number(arena.capacity_bytes()); });
  metrics.AddGauge(
      "rapt_kv_used_bytes",
      "Memory in use for them, with reserved pages, tables and free places in between.", {},
      [=, &arena] { return number(arena.committed_bytes()); });
  metrics.AddGauge("rapt_kv_reserved_bytes", "Pages taken by reserve_tokens and not yet written.",
                   {}, [=, this] { return number(context_.reserved_bytes); });
  metrics.AddGauge("rapt_kv_shared_bytes",
                   "Bytes that caches reach beyond those of their pages, because they share some.",
                   {}, [=, this] {
                     const int64_t shared = context_.reached_bytes - context_.arena.used_bytes();
                     return number(std::max<int64_t>(0, shared));
                   });
  metrics.AddGauge("rapt_kv_caches", "Live caches.", {}, [=, this] { return number(caches()); });
  metrics.AddCounter("rapt_kv_expired_total", "Caches whose lease ran out.", {},
                     [=, this] { return number(directory_.expired()); });
  metrics.AddCounter("rapt_kv_read_bytes_total", "Keys and values that calls have read.", {},
                     [=, this] { return number(read_bytes_); });
  metrics.AddCounter("rapt_kv_saved_bytes_total",
                     "Keys and values that were read once for several items of a call.", {},
                     [=, this] { return number(saved_bytes_); });
  for (int n = 1; n < kReasons; ++n) {
    const auto reason = static_cast<Reason>(n);
    metrics.AddCounter("rapt_kv_refused_total", "Refusals, by rapt-reason.",
                       {{"reason", std::string(NameOf(reason))}},
                       [=, this] { return number(refusals_.count(reason)); });
  }
}

}  // namespace rapt::cache
