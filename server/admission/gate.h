// Admission control: grants memory to calls, queues them, or rejects them.
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
#include "base/metric_sink.h"
#include "base/mutex.h"
#include "base/timer.h"
#include "server/admission/memory_budget.h"
#include "server/queue_state.h"

namespace rapt {

// One budget in two shares. A call first reserves bytes of the receive share for its message, then,
// once, everything that computing and answering it takes from the compute share.
//
// Deadlock-free: a call that waits for the receive share holds no memory, a call that waits for the
// compute share holds none of that share, and a call that holds some of it waits for no memory. It
// ends by computing and sending, both bounded by its deadline; then the next in the queue is
// served.
//
// First come, first served within a priority. A request that does not fit blocks those behind it,
// so that later small requests cannot starve large ones. To bound this head-of-line blocking, an
// eighth of each share is reserved for requests of at most 1/64 of the budget.
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

  struct MemoryRequest {
    Share share = Share::kCompute;
    int64_t bytes = 0;
    uint64_t priority = 0;  // Request::priority
    Instant deadline = Instant::max();
    const std::atomic<bool>* cancelled = nullptr;  // null: never
  };

  struct Admission {
    MemoryBudget::Reservation reservation;
    std::chrono::nanoseconds waited{0};
  };
  // ResourceExhausted for a request that can never fit, with needed and allowed bytes, if the queue
  // is full, with its limit, or after max_queue_delay; DeadlineExceeded; Cancelled.
  using Result = absl::StatusOr<Admission>;
  using Callback = absl::AnyInvocable<void(Result)>;

  AdmissionGate(const Options& options, Timer& timer, const Clock& clock);
  AdmissionGate(const AdmissionGate&) = delete;
  AdmissionGate& operator=(const AdmissionGate&) = delete;

  // Returns the result, or nullopt if the request has to wait.
  std::optional<Result> AdmitNow(const MemoryRequest& request);

  // Queues the request. Calls `callback` exactly once: immediately if rejected, otherwise later.
  void Queue(const MemoryRequest& request, Callback callback);

  // Charges bytes received without admission, beyond the share's limit if necessary, so that later
  // requests wait.
  MemoryBudget::Reservation Charge(Share share, int64_t bytes) {
    return account(share).general.Charge(bytes);
  }

  // Serves the queue on the calling thread, which has released bytes and may run callbacks.
  // Optional: the timer's thread serves the queue as well.
  void Serve();

  // Call after setting a request's `cancelled`: makes the timer's thread check the queue.
  void NoticeCancellation() { WakeIfQueued(); }

  // Returns the most that one request may take of a share.
  int64_t LimitOf(Share share) const { return account(share).general.capacity_bytes(); }
  int64_t capacity_bytes() const { return options_.budget_bytes; }
  const Options& options() const { return options_; }
  int64_t reserved_bytes() const;
  int64_t reserved_bytes(Share share) const;
  QueueState waiting() const;
  void ExportTo(MetricSink& sink) const;

 private:
  struct Waiter {
    MemoryRequest request;
    Callback callback;
    Instant since;
    Instant queue_end;

    Instant limit() const { return std::min(request.deadline, queue_end); }
  };
  using Queued = std::multimap<uint64_t, Waiter>;  // by priority, then in order of arrival

  struct Account {
    Account(int64_t general_bytes, int64_t small_bytes, const std::function<void()>& on_release)
        : general(general_bytes, on_release), small(small_bytes, on_release) {}
    MemoryBudget general;
    MemoryBudget small;
    Queued queue;  // guarded by the gate's mutex
  };

  struct Decision {
    Callback callback;
    Result result;
  };

  Account& account(Share share) { return share == Share::kReceive ? receive_ : compute_; }
  const Account& account(Share share) const {
    return share == Share::kReceive ? receive_ : compute_;
  }
  bool IsSmall(int64_t bytes) const;
  absl::Status CheckFitsShare(const MemoryRequest& request) const;
  absl::Status CheckAlive(const Waiter& waiter, Instant now) const;
  std::optional<MemoryBudget::Reservation> TryReserve(Account& account,
                                                      const MemoryRequest& request)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Decide(Account& account, std::vector<Decision>& decisions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void DequeueExpired(Account& account, Instant now, std::vector<Decision>& decisions)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  Queued::iterator Dequeue(Account& account, Queued::iterator waiter, Result result,
                           std::vector<Decision>& decisions) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void WakeIfQueued();

  const Options options_;
  const Clock& clock_;
  mutable Mutex mutex_;
  Account receive_;
  Account compute_;
  std::atomic<int64_t> waiting_{0};
  Alarm alarm_;  // fires when a queued request expires or bytes are released
};

}  // namespace rapt

#endif  // RAPT_SERVER_ADMISSION_GATE_H_
