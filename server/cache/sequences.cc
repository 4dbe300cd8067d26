#include "server/cache/sequences.h"

#include <algorithm>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/cache/reason.h"

namespace rapt::cache {

std::string ToString(const SequenceId& id) {
  const uint64_t* const number = std::get_if<uint64_t>(&id);
  return number != nullptr ? absl::StrCat(*number) : std::get<std::string>(id);
}

Sequences::Turn::Turn(Sequences& sequences, Sequence& sequence, const SequenceCall& call,
                      bool has_waited)
    : sequences_(&sequences),
      sequence_(&sequence),
      starts_(call.starts),
      ends_(call.ends),
      has_waited_(has_waited),
      cache_(sequences.CacheFor(sequence, call)) {}

Sequences::Turn::Turn(Turn&& other) noexcept
    : sequences_(other.sequences_),
      sequence_(std::exchange(other.sequence_, nullptr)),
      starts_(other.starts_),
      ends_(other.ends_),
      has_waited_(other.has_waited_),
      cache_(std::move(other.cache_)) {}

Sequences::Turn::~Turn() {
  if (sequence_ == nullptr) return;
  End(/*succeeded=*/false);
  sequences_->Leave(*sequence_);
}

void Sequences::Turn::End(bool succeeded) {
  if (ends_ || (starts_ && !succeeded)) sequences_->Close(*sequence_);
  starts_ = ends_ = false;
}

void Sequences::Enter(const std::string& owner, SequenceCall call, Run run) {
  Sequence* sequence = nullptr;
  {
    MutexLock lock(mutex_);
    RemoveDead();
    const auto [place, is_new] = sequences_.try_emplace(Key{owner, call.scope, call.id});
    sequence = &place->second;
    if (is_new) sequence->place = place;
    // EndAll() may be over, and would not find this call.
    if (place->first.scope != nullptr && *place->first.scope) sequence->is_ending = true;
    sequence->waiting.push_back({std::move(call), std::move(run), sequence->has_turn});
    if (std::exchange(sequence->has_turn, true)) return;
  }
  BeginTurns(*sequence);
}

// Takes the sequence's next call. Without one, no call has the turn.
bool Sequences::TakeNext(Sequence& sequence, Waiting& next) {
  MutexLock lock(mutex_);
  if (sequence.waiting.empty()) {
    sequence.has_turn = false;
    if (sequence.is_ending) Close(sequence);
    if (sequence.cache.empty()) sequences_.erase(sequence.place);
    return false;
  }
  next = std::move(sequence.waiting.front());
  sequence.waiting.pop_front();
  sequence.is_beginning = true;
  sequence.has_left = false;
  return true;
}

// Turns that end before their `run` returns are followed in a loop, not by recursion, whose depth a
// caller would choose.
void Sequences::BeginTurns(Sequence& sequence) {
  Waiting next;
  while (TakeNext(sequence, next)) {
    next.run(Turn(*this, sequence, next.call, next.has_waited));
    MutexLock lock(mutex_);
    sequence.is_beginning = false;
    if (!sequence.has_left) return;
  }
}

void Sequences::Leave(Sequence& sequence) {
  {
    MutexLock lock(mutex_);
    if (sequence.is_beginning) {
      sequence.has_left = true;
      return;
    }
  }
  BeginTurns(sequence);
}

void Sequences::EndAll(const SequenceScope& scope) {
  std::vector<std::pair<std::string, std::string>> ended;  // owners and their caches
  {
    MutexLock lock(mutex_);
    for (auto next = sequences_.begin(); next != sequences_.end();) {
      const auto place = next++;
      Sequence& sequence = place->second;
      if (place->first.scope != scope) continue;
      sequence.is_ending = true;
      if (sequence.has_turn) continue;
      ended.emplace_back(place->first.owner, std::move(sequence.cache));
      sequences_.erase(place);
    }
  }
  // Without the lock, for which all calls of sequences wait.
  for (const auto& [owner, cache] : ended) CloseCache(owner, cache);
}

absl::StatusOr<std::string> Sequences::CacheFor(Sequence& sequence, const SequenceCall& call) {
  const std::string& owner = sequence.place->first.owner;
  if (call.starts) {
    Close(sequence);
    RAPT_ASSIGN_OR_RETURN(CacheInfo made, store_.Create(owner, call.spec));
    sequence.cache = made.id;
  } else if (!store_.Has(owner, sequence.cache)) {
    sequence.cache.clear();
    return Fail(Reason::kUnknown, absl::StatusCode::kNotFound,
                absl::StrCat("no sequence ", ToString(call.id), " runs"));
  }
  return sequence.cache;
}

void Sequences::Close(Sequence& sequence) {
  CloseCache(sequence.place->first.owner, std::exchange(sequence.cache, ""));
}

void Sequences::CloseCache(const std::string& owner, const std::string& cache) {
  // Its lease may have run out, which is no refusal to be counted.
  if (store_.Has(owner, cache)) store_.Close(owner, {&cache, 1}).IgnoreError();
}

void Sequences::RemoveDead() {
  if (sequences_.size() <= most_) return;
  for (auto next = sequences_.begin(); next != sequences_.end();) {
    const auto place = next++;
    if (place->second.has_turn || store_.Has(place->first.owner, place->second.cache)) continue;
    sequences_.erase(place);
  }
  most_ = std::max(kFewSequences, 2 * sequences_.size());
}

size_t Sequences::size() const {
  MutexLock lock(mutex_);
  return sequences_.size();
}

}  // namespace rapt::cache
