// Who may have memory, who waits for it, who is refused.
#ifndef RAPT_SERVER_ADMISSION_GATE_H_
#define RAPT_SERVER_ADMISSION_GATE_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/any_invocable.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "base/timer.h"
#include "server/admission/memory_budget.h"
#include "server/queue_state.h"

namespace rapt {

// One budget in two shares. A call first takes bytes of the receive share for its message, then,
// once, everything that its answer takes from the compute share.
//
// There is no deadlock: who waits for the receive share holds nothing, and who waits for the
// compute share holds nothing of it, while those who do hold some wait for no memory. They end by
// computing and by sending, both of which deadlines bound; then the next in the queue is served.
//
// First come, first served within a priority; what does not fit lets nobody by, so that large
// requests are not starved by later small ones. But an eighth of each share is kept for requests of
// at most 1/64 of the budget, which therefore never wait for large ones only.
//
// Thread-safe. Grants run outside its lock, on the timer's thread or on one that calls Serve().
class AdmissionGate {
 public:
  struct Options {
    int64_t budget_bytes = 0;
    int64_t max_queued = 0;
    std::chrono::nanoseconds max_queue_delay{0};
  };

  enum class Share : uint8_t { kReceive, kCompute };

  struct Ask {
    Share share = Share::kCompute;
    int64_t bytes = 0;
    // 1 is the most urgent; 0 counts as kDefaultPriority.
    uint64_t priority = 0;
    Instant deadline = Instant::max();
    const std::atomic<bool>* cancelled = nullptr;  // null: never
  };
  // Leaves room for the more and the less urgent.
  static constexpr uint64_t kDefaultPriority = 8;

  struct Admission {
    MemoryBudget::Reservation reservation;
    std::chrono::nanoseconds waited{0};
  };
  // ResourceExhausted, with needed and allowed bytes, for what can never fit, with the queue's
  // limit where that is full, or with the time waited; DeadlineExceeded; Cancelled.
  using Outcome = absl::StatusOr<Admission>;
  using Grant = absl::AnyInvocable<void(Outcome)>;

  AdmissionGate(const Options& options, Timer& timer, const Clock& clock);
  AdmissionGate(const AdmissionGate&) = delete;
  AdmissionGate& operator=(const AdmissionGate&) = delete;

  // What can be said at once; nothing where the request has to wait.
  std::optional<Outcome> AdmitNow(const Ask& ask);

  // Waits until it can be said. Calls `grant` exactly once, later, or now where it is refused.
  void Queue(const Ask& ask, Grant grant);

  // For bytes that have come unasked: beyond the share's limit if need be, so that others wait.
  MemoryBudget::Reservation Charge(Share share, int64_t bytes) {
    return account(share).general.Charge(bytes);
  }

  // Serves those who wait, for one who gave bytes back and may run their grants. Others need not:
  // the timer's thread serves too.
  void Serve();

  // Somebody's `cancelled` was set: lets the timer's thread look who.
  void NoticeCancellation() { WakeIfAnybodyWaits(); }

  // What one request may take of a share.
  int64_t LimitOf(Share share) const { return account(share).general.capacity_bytes(); }
  int64_t capacity_bytes() const { return options_.budget_bytes; }
  const Options& options() const { return options_; }
  int64_t reserved_bytes() const;
  int64_t reserved_bytes(Share share) const;
  QueueState waiting() const;

 private:
  struct Waiter {
    Ask ask;
    Grant grant;
    Instant since;
    Instant queue_end;

    Instant limit() const { return std::min(ask.deadline, queue_end); }
  };
  using Queued = std::multimap<uint64_t, Waiter>;  // by priority; equal ones as they came

  struct Account {
    Account(int64_t general_bytes, int64_t small_bytes, const std::function<void()>& on_release)
        : general(general_bytes, on_release), small(small_bytes, on_release) {}
    MemoryBudget general;
    MemoryBudget small;
    Queued queue;  // guarded by the gate's mutex
  };

  struct Decision {
    Grant grant;
    Outcome outcome;
  };

  Account& account(Share share) { return share == Share::kReceive ? receive_ : compute_; }
  const Account& account(Share share) const {
    return share == Share::kReceive ? receive_ : compute_;
  }
  bool IsSmall(int64_t bytes) const;
  absl::Status RefuseWhatNeverFits(const Ask& ask) const;
  absl::Status CheckAlive(const Waiter& waiter, Instant now) const;
  std::optional<MemoryBudget::Reservation> TryReserve(Account& account, const Ask& ask)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Decide(Account& account, std::vector<Decision>& decisions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DismissTheLate(Account& account, Instant now, std::vector<Decision>& decisions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Queued::iterator Dismiss(Account& account, Queued::iterator waiter, Outcome outcome,
                           std::vector<Decision>& decisions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeIfAnybodyWaits();

  const Options options_;
  const Clock& clock_;
  mutable Mutex mutex_;
  Account receive_;
  Account compute_;
  std::atomic<int64_t> waiting_{0};
  Alarm alarm_;  // rings when somebody's time is over or bytes came back
};

}  // namespace rapt

#endif  // RAPT_SERVER_ADMISSION_GATE_H_
