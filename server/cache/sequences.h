// Sequences: caches that their callers know by ids of their own, and whose calls have an order.
#ifndef RAPT_SERVER_CACHE_SEQUENCES_H_
#define RAPT_SERVER_CACHE_SEQUENCES_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "server/cache/cache_store.h"

namespace rapt::cache {

// 5 and "5" name two sequences.
using SequenceId = std::variant<uint64_t, std::string>;
std::string ToString(const SequenceId& id);

// Sequences that end together, and that have ids of their own. True once it has ended. Null is the
// scope that never ends.
using SequenceScope = std::shared_ptr<const std::atomic<bool>>;

// One call of a sequence.
struct SequenceCall {
  SequenceId id = {};
  SequenceScope scope = {};
  bool starts = false;  // a new sequence, in place of a running one
  bool ends = false;    // the sequence, after this call
  CacheSpec spec = {};  // of the cache of a call that starts
};

// The cache of a sequence lives from the call that starts it to the end of the call that ends it,
// and no longer than its lease. A call that starts and fails leaves no sequence.
//
// Calls of a sequence have turns, one after the other in the order of Enter(). Other sequences do
// not wait for them.
//
// Records of sequences whose lease has run out are removed once there are more of them than of
// others. Thread-safe. REQUIRES: `store` outlives it, and it outlives all turns.
class Sequences {
  struct Sequence;

 public:
  // The time in which a call may use the cache. Move-only. Its destruction starts the next turn.
  class Turn {
   public:
    Turn(Turn&& other) noexcept;
    Turn& operator=(Turn&&) = delete;
    ~Turn();

    // Returns the id of the cache, of generation 1. NotFound, with a Reason, if the sequence does
    // not run; otherwise the statuses of CacheStore::Create().
    const absl::StatusOr<std::string>& cache() const { return cache_; }
    // Whether the call waited, so that this is a thread of another call.
    bool has_waited() const { return has_waited_; }
    // The call has ended. Without this, a call that starts counts as failed.
    void End(bool succeeded);

   private:
    friend class Sequences;
    Turn(Sequences& sequences, Sequence& sequence, const SequenceCall& call, bool has_waited);

    Sequences* sequences_;
    Sequence* sequence_;  // null: moved away
    bool starts_, ends_;
    bool has_waited_;
    absl::StatusOr<std::string> cache_;
  };
  using Run = absl::AnyInvocable<void(Turn)>;

  explicit Sequences(CacheStore& store) : store_(store) {}
  Sequences(const Sequences&) = delete;
  Sequences& operator=(const Sequences&) = delete;

  // Calls `run` once with the turn: on this thread if the sequence has no other calls, else on the
  // thread that ends the turn before it.
  void Enter(const std::string& owner, SequenceCall call, Run run);

  // Ends the sequences of a scope, each when none of its calls runs or waits. A call that enters
  // later and starts a sequence is its only one. REQUIRES: the scope has ended.
  void EndAll(const SequenceScope& scope);

  CacheStore& store() const { return store_; }
  // The records, also of sequences whose lease has run out.
  size_t size() const;

 private:
  struct Key {
    std::string owner;
    SequenceScope scope;
    SequenceId id;
    // clang-tidy 14 takes the comparison with 0 for a pointer.
    // NOLINTNEXTLINE(modernize-use-nullptr)
    auto operator<=>(const Key&) const = default;
  };
  struct Waiting {
    SequenceCall call;
    Run run;
    bool has_waited = false;
  };
  struct Sequence {
    std::map<Key, Sequence>::iterator place;
    std::string cache;  // empty: none. Of whoever has the turn; without turns, of the mutex
    std::deque<Waiting> waiting;
    bool is_ending = false;     // after its last call
    bool has_turn = false;      // a call has its turn, or is about to
    bool is_beginning = false;  // its `run` has not returned yet
    bool has_left = false;      // and its turn is over already
  };

  void BeginTurns(Sequence& sequence);
  void Leave(Sequence& sequence);
  bool TakeNext(Sequence& sequence, Waiting& next);
  absl::StatusOr<std::string> CacheFor(Sequence& sequence, const SequenceCall& call);
  void Close(Sequence& sequence);
  void CloseCache(const std::string& owner, const std::string& cache);
  void RemoveDead() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);

  CacheStore& store_;
  mutable Mutex mutex_;
  std::map<Key, Sequence> sequences_ ABSL_GUARDED_BY(mutex_);
  static constexpr size_t kFewSequences = 64;
  size_t most_ ABSL_GUARDED_BY(mutex_) = kFewSequences;  // before dead ones are removed
};

}  // namespace rapt::cache

#endif  // RAPT_SERVER_CACHE_SEQUENCES_H_
