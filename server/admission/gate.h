// Admission control: grants memory to calls, queues them, or rejects them.
#ifndef RAPT_SERVER_ADMISSION_GATE_H_
#define RAPT_SERVER_ADMISSION_GATE_H_

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/clock.h"
#include "base/metric_sink.h"
#include "base/mutex.h"
#include "base/timer.h"
#include "server/admission/caller_memory.h"
#include "server/admission/fair_queue.h"
#include "server/admission/memory_budget.h"
#include "server/queue_state.h"

namespace rapt {

// One budget in two shares. A call first reserves bytes of the receive share for its message. Then
// it reserves, once, all bytes of the compute share that it needs until its response is sent.
//
// Deadlock-free: a call that waits for the receive share holds no memory, unless the size of its
// message is unknown: then it waits for a second at most. A call that waits for the compute share
// holds none of that share, and a call that holds some of it waits for no memory. It ends by
// computing and sending, both bounded by its deadline; then the next in the queue is served. A
// model that is loaded holds at most the memory of its index while it waits for that of its
// weights, and gives up after max_queue_delay.
//
// FairQueue orders the requests that wait. To bound head-of-line blocking, an eighth of each share
// is reserved for requests of at most 1/64 of the budget. A caller gets no more of it than it
// leaves free, so that each further caller finds some.
//
// Silent calls. A call that holds memory may wait for its peer to send or to read. If a request
// within its caller's fair share has waited for kSilentTime, the longest silent call that holds
// memory of that share, of a caller above its fair share, is ended, and the next one if that does
// not suffice. The caller is confined to a fair share until it has had no silent call of that share
// for kConfinedTime, or it would regain the memory between two requests of others. A caller's only
// call that holds memory of the share stays while its peer keeps up with the minimum rate: a
// message that alone exceeds the fair share would otherwise never arrive.
//
// Thread-safe. Callbacks run outside the lock, on the timer's thread or on one that calls Serve().
class AdmissionGate {
 public:
  struct Options {
    int64_t budget_bytes = 0;
    int64_t max_queued = 0;
    std::chrono::nanoseconds max_queue_delay{0};
  };

  enum class Share : uint8_t { kReceive, kCompute };

  // The shares of which a call holds memory.
  struct Shares {
    bool receive = false;
    bool compute = false;
  };

  struct MemoryRequest {
    Share share = Share::kCompute;
    int64_t bytes = 0;
    uint64_t priority = 0;  // Request::priority
    Instant deadline = Instant::max();
    const std::atomic<bool>* cancelled = nullptr;  // null: never
    std::shared_ptr<CallerMemory> caller = {};     // of this gate; null: the server itself
    bool yields = false;                           // WaitingRequest::yields
    absl::string_view what = {};                   // in errors; empty: that of a call
  };

  struct Admission {
    MemoryBudget::Reservation reservation;
    std::chrono::nanoseconds waited{0};
  };
  // ResourceExhausted for a request that can never fit, with needed and allowed bytes, if the queue
  // is full, with its limit, or after max_queue_delay; DeadlineExceeded; Cancelled.
  using Result = absl::StatusOr<Admission>;
  using Callback = absl::AnyInvocable<void(Result)>;

  static constexpr std::chrono::seconds kSilentTime{2};
  static constexpr std::chrono::minutes kConfinedTime{1};

  // Whether a peer keeps up with the minimum rate. Thread-safe with one writer at a time.
  class PeerPace {
   public:
    void Begin(Instant now) { silent_at_ = now + kSilentTime; }
    // The peer has moved bytes for which the minimum rate allows `time`. A burst counts for no more
    // than kSilentTime.
    void Advance(Instant now, std::chrono::nanoseconds time) {
      silent_at_ = std::min(now + kSilentTime, silent_at_.load() + time);
    }
    // Returns when the peer counts as silent unless it moves more.
    Instant silent_at() const { return silent_at_.load(); }

   private:
    std::atomic<Instant> silent_at_{Instant::min()};
  };

  // A call's wait for its peer, until destruction. Movable; not thread-safe.
  class PeerWait {
   public:
    PeerWait() = default;
    PeerWait(PeerWait&& other) noexcept { *this = std::move(other); }
    PeerWait& operator=(PeerWait&& other) noexcept {
      std::swap(gate_, other.gate_);
      std::swap(key_, other.key_);
      return *this;
    }
    ~PeerWait() {
      if (gate_ != nullptr) gate_->EndWait(key_);
    }

   private:
    friend class AdmissionGate;
    using Key =
        std::pair<Instant, uint64_t>;  // when the call counts as silent, and a unique number
    PeerWait(AdmissionGate* gate, Key key) : gate_(gate), key_(key) {}

    AdmissionGate* gate_ = nullptr;
    Key key_{};
  };

  // Bytes of the compute share that are held longer than calls wait, such as those of weights. What
  // they take is beyond the reach of requests: the limit of one request shrinks by it. Movable; not
  // thread-safe.
  class LongReservation {
   public:
    LongReservation() = default;
    LongReservation(LongReservation&& other) noexcept { *this = std::move(other); }
    LongReservation& operator=(LongReservation&& other) noexcept {
      std::swap(gate_, other.gate_);
      std::swap(reservation_, other.reservation_);
      return *this;
    }
    ~LongReservation() {
      if (gate_ != nullptr) gate_->long_reserved_ -= reservation_.bytes();
    }

    int64_t bytes() const { return reservation_.bytes(); }

   private:
    friend class AdmissionGate;
    LongReservation(AdmissionGate* gate, MemoryBudget::Reservation reservation)
        : gate_(gate), reservation_(std::move(reservation)) {}

    AdmissionGate* gate_ = nullptr;
    MemoryBudget::Reservation reservation_;
  };

  AdmissionGate(const Options& options, Timer& timer, const Clock& clock);
  AdmissionGate(const AdmissionGate&) = delete;
  AdmissionGate& operator=(const AdmissionGate&) = delete;

  // Returns the result, or nullopt if the request has to wait.
  std::optional<Result> AdmitNow(const MemoryRequest& request);

  // Queues the request. Calls `callback` exactly once: immediately if rejected, otherwise later.
  void Queue(const MemoryRequest& request, Callback callback);

  // Charges bytes received without admission, beyond the share's limit if necessary, so that later
  // requests wait.
  MemoryBudget::Reservation Charge(Share share, int64_t bytes,
                                   const std::shared_ptr<CallerMemory>& caller = nullptr) {
    return account(share).general.Charge(bytes, BytesOf(caller, share));
  }

  // Reserves bytes of the compute share for the server itself and waits for requests to release
  // them; requests within their callers' fair shares go first. Returns ResourceExhausted, with
  // `what` and needed and allowed bytes, if they can't fit or do not become free within
  // max_queue_delay. Blocks: call it on a thread that no request needs.
  absl::StatusOr<MemoryBudget::Reservation> ReserveBehindCalls(int64_t bytes,
                                                               absl::string_view what);
  // The same for long, of all weights three quarters of the compute share at most.
  // REQUIRES: one call at a time.
  absl::StatusOr<LongReservation> ReserveForLong(int64_t bytes);

  // Returns the record of this caller's memory, which all its calls share.
  std::shared_ptr<CallerMemory> CallerOf(const std::string& name);

  // A call that holds memory of `shares` counts as silent from `silent_at` on; its caller's only
  // one from that of `pace` on, which outlives the result, or never if that is null. `end` is
  // called at most once, by any thread under the gate's lock: it must do no more than wake another
  // thread. It is not running once the result is destroyed.
  PeerWait WaitForPeer(std::shared_ptr<CallerMemory> caller, Shares shares, Instant silent_at,
                       absl::AnyInvocable<void()> end, const PeerPace* pace = nullptr);

  // Serves the queue on the calling thread, which has released bytes and may run callbacks.
  // Optional: the timer's thread serves the queue as well.
  void Serve();

  // Call after setting a request's `cancelled`: makes the timer's thread check the queue.
  void NoticeCancellation() { WakeIfQueued(); }

  // Returns the most that one request may take of a share.
  int64_t LimitOf(Share share) const {
    const int64_t capacity = account(share).general.capacity_bytes();
    return share == Share::kCompute ? capacity - long_reserved_bytes() : capacity;
  }
  int64_t capacity_bytes() const { return options_.budget_bytes; }
  const Options& options() const { return options_; }
  int64_t reserved_bytes() const;
  int64_t reserved_bytes(Share share) const;
  int64_t long_reserved_bytes() const { return long_reserved_.load(); }
  QueueState waiting() const;
  void ExportTo(MetricSink& sink) const;

 private:
  struct Waiter final : WaitingRequest {
    MemoryRequest request;
    Callback callback;
    Instant queue_end;

    Instant limit() const { return std::min(request.deadline, queue_end); }
  };

  struct Account {
    Account(const Options& options, const std::function<void()>& on_release);
    std::atomic<int64_t> holders{0};
    MemoryBudget general;
    MemoryBudget small;
    FairQueue queue;                // guarded by the gate's mutex
    Instant next_search_of_a_call;  // to end; guarded by the gate's mutex
  };

  // A call that waits for its peer.
  struct WaitingCall {
    // Returns the memory of a share that its caller holds, or null if the call holds none of it.
    CallerBytes* Held(Share share) const {
      if (share == Share::kReceive) return shares.receive ? &caller->receive : nullptr;
      return shares.compute ? &caller->compute : nullptr;
    }

    std::shared_ptr<CallerMemory> caller;
    Shares shares;
    absl::AnyInvocable<void()> end;
    const PeerPace* pace;
  };

  struct Confinement {
    Instant end;
    std::shared_ptr<CallerBytes> caller;
  };

  struct Decision {
    Callback callback;
    Result result;
  };

  Account& account(Share share) { return share == Share::kReceive ? receive_ : compute_; }
  const Account& account(Share share) const {
    return share == Share::kReceive ? receive_ : compute_;
  }
  static std::shared_ptr<CallerBytes> BytesOf(const std::shared_ptr<CallerMemory>& caller,
                                              Share share);
  // Copies what the queue needs to know.
  static void Describe(const MemoryRequest& request, WaitingRequest& waiting);
  static Waiter& AsWaiter(const FairQueue::Entry& entry);
  bool IsSmall(int64_t bytes) const;
  // Returns whether a request may be offered bytes of the part for small requests.
  bool MayUseSmall(const Account& account, const WaitingRequest& request) const;
  absl::Status CheckFitsShare(const MemoryRequest& request) const;
  absl::Status CheckAlive(const Waiter& waiter, Instant now) const;
  std::optional<MemoryBudget::Reservation> TryReserve(Account& account,
                                                      const MemoryRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  FairQueue::Entry Enqueue(FairQueue::Entry entry);
  FairQueue::Entry Displace(const MemoryRequest& newcomer) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  // Returns the latest time of the next decision.
  Instant Decide(Share share, std::vector<Decision>& decisions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DequeueExpired(Account& account, Instant now, std::vector<Decision>& decisions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Dequeue(FairQueue::Entry entry, Result result, std::vector<Decision>& decisions);
  // Returns the earliest time at which a silent call may have to end.
  Instant EndSilentCall(Share share, Instant now) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Confine(std::shared_ptr<CallerBytes> caller, Instant now)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  bool HasSilentCall(const CallerBytes* caller, Instant now) const
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndConfinements() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void EndWait(const PeerWait::Key& key);
  void WakeIfQueued();

  const Options options_;
  const Clock& clock_;
  mutable Mutex mutex_;
  Account receive_;
  Account compute_;
  std::atomic<int64_t> waiting_{0};
  std::atomic<int64_t> long_reserved_{0};
  std::map<PeerWait::Key, WaitingCall> waiting_calls_ ABSL_GUARDED_BY(mutex_);
  uint64_t next_wait_ ABSL_GUARDED_BY(mutex_) = 0;
  std::deque<Confinement> confinements_ ABSL_GUARDED_BY(mutex_);  // by their end

  Mutex callers_mutex_;
  absl::flat_hash_map<std::string, std::weak_ptr<CallerMemory>> callers_
      ABSL_GUARDED_BY(callers_mutex_);
  size_t most_callers_ ABSL_GUARDED_BY(callers_mutex_) = 64;  // before expired ones are removed

  Alarm alarm_;  // fires when a queued request expires or bytes are released
};

}  // namespace rapt

#endif  // RAPT_SERVER_ADMISSION_GATE_H_
