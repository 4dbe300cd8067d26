#include "server/admission/gate.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "server/rejection.h"
#include "server/request.h"

namespace rapt {
namespace {

constexpr int64_t kSmallPart = 64;    // a small request takes at most 1/64 of the budget
constexpr int64_t kReservedPart = 8;  // 1/8 of the budget is reserved for small requests
constexpr int64_t kShares = 2;

int64_t SmallBytes(int64_t budget) { return budget / kReservedPart / kShares; }
int64_t GeneralBytes(int64_t budget) { return budget / kShares - SmallBytes(budget); }

absl::string_view NameOf(AdmissionGate::Share share) {
  return share == AdmissionGate::Share::kReceive ? "message" : "memory for outputs and workspace";
}

}  // namespace

AdmissionGate::AdmissionGate(const Options& options, Timer& timer, const Clock& clock)
    : options_(options),
      clock_(clock),
      receive_(GeneralBytes(options.budget_bytes), SmallBytes(options.budget_bytes),
               [this] { WakeIfQueued(); }),
      compute_(GeneralBytes(options.budget_bytes), SmallBytes(options.budget_bytes),
               [this] { WakeIfQueued(); }),
      alarm_(timer, [this] { Serve(); }) {}

int64_t AdmissionGate::reserved_bytes(Share share) const {
  return account(share).general.reserved_bytes() + account(share).small.reserved_bytes();
}

int64_t AdmissionGate::reserved_bytes() const {
  return reserved_bytes(Share::kReceive) + reserved_bytes(Share::kCompute);
}

QueueState AdmissionGate::waiting() const {
  const Instant now = clock_.Now();
  QueueState state;
  MutexLock lock(mutex_);
  for (const Queued* queue : {&receive_.queue, &compute_.queue}) {
    for (const auto& [priority, waiter] : *queue) {
      ++state.depth;
      state.oldest_age = std::max(state.oldest_age, now - waiter.since);
    }
  }
  return state;
}

bool AdmissionGate::IsSmall(int64_t bytes) const {
  return bytes <= options_.budget_bytes / kSmallPart;
}

absl::Status AdmissionGate::CheckFitsShare(const MemoryRequest& request) const {
  if (request.bytes <= LimitOf(request.share)) return absl::OkStatus();
  return Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the ", NameOf(request.share), " needs ", request.bytes,
                             " bytes; at most ", LimitOf(request.share),
                             " of the memory budget of ", options_.budget_bytes, " are allowed"));
}

absl::Status AdmissionGate::CheckAlive(const Waiter& waiter, Instant now) const {
  const MemoryRequest& request = waiter.request;
  if (request.cancelled != nullptr && request.cancelled->load(std::memory_order_relaxed)) {
    return absl::CancelledError("the caller cancelled the request");
  }
  if (now >= request.deadline) {
    return absl::DeadlineExceededError("the deadline passed while the request waited for memory");
  }
  if (now >= waiter.queue_end) {
    return Reject(Rejection::kQueueTime, absl::StatusCode::kResourceExhausted,
                  absl::StrCat("the ", NameOf(request.share), " needs ", request.bytes,
                               " bytes, which did not become free in ",
                               Milliseconds(now - waiter.since), " ms in the queue"));
  }
  return absl::OkStatus();
}

std::optional<AdmissionGate::Result> AdmissionGate::AdmitNow(const MemoryRequest& request) {
  if (absl::Status status = CheckFitsShare(request); !status.ok()) return status;
  MutexLock lock(mutex_);
  if (auto reservation = TryReserve(account(request.share), request)) {
    return Admission{*std::move(reservation)};
  }
  return std::nullopt;
}

std::optional<MemoryBudget::Reservation> AdmissionGate::TryReserve(Account& account,
                                                                   const MemoryRequest& request) {
  const Queued& queue = account.queue;
  std::optional<MemoryBudget::Reservation> reservation;
  if (queue.empty()) reservation = account.general.Reserve(request.bytes);
  if (reservation || !IsSmall(request.bytes)) return reservation;
  const bool small_queued = std::any_of(queue.begin(), queue.end(), [this](const auto& w) {
    return IsSmall(w.second.request.bytes);
  });
  if (!small_queued) reservation = account.small.Reserve(request.bytes);
  return reservation;
}

void AdmissionGate::Queue(const MemoryRequest& request, Callback callback) {
  const Instant now = clock_.Now();
  Waiter waiter{request, std::move(callback), now, now + options_.max_queue_delay};
  absl::Status status = CheckAlive(waiter, now);
  if (status.ok()) {
    MutexLock lock(mutex_);
    if (waiting_.load() < options_.max_queued) {
      ++waiting_;  // before Serve() checks for free bytes, see MemoryBudget
      account(request.share).queue.emplace(PriorityLevel(request.priority), std::move(waiter));
      alarm_.SetNoLaterThan(now);  // bytes may have been released meanwhile
      return;
    }
    status = Reject(Rejection::kQueueFull, absl::StatusCode::kResourceExhausted,
                    absl::StrCat("the ", NameOf(request.share), " needs ", request.bytes,
                                 " bytes, which are not free now, and the queue is full with ",
                                 options_.max_queued, " requests"));
  }
  waiter.callback(std::move(status));
}

void AdmissionGate::Serve() {
  if (waiting_.load() == 0) return;
  std::vector<Decision> decisions;
  {
    MutexLock lock(mutex_);
    Decide(receive_, decisions);
    Decide(compute_, decisions);
    Instant next = Instant::max();
    for (const Queued* queue : {&receive_.queue, &compute_.queue}) {
      for (const auto& [priority, waiter] : *queue) next = std::min(next, waiter.limit());
    }
    alarm_.SetNoLaterThan(next);
  }
  for (Decision& decision : decisions) decision.callback(std::move(decision.result));
}

void AdmissionGate::Decide(Account& account, std::vector<Decision>& decisions) {
  const Instant now = clock_.Now();
  DequeueExpired(account, now, decisions);
  Queued& queue = account.queue;
  while (!queue.empty()) {
    const Waiter& first = queue.begin()->second;
    auto reservation = account.general.Reserve(first.request.bytes);
    if (!reservation) break;
    Admission admission{*std::move(reservation), now - first.since};
    Dequeue(account, queue.begin(), std::move(admission), decisions);
  }
  for (auto it = queue.begin(); it != queue.end();) {
    const Waiter& waiter = it->second;
    if (!IsSmall(waiter.request.bytes)) {
      ++it;
      continue;
    }
    auto reservation = account.small.Reserve(waiter.request.bytes);
    if (!reservation) break;
    Admission admission{*std::move(reservation), now - waiter.since};
    it = Dequeue(account, it, std::move(admission), decisions);
  }
}

void AdmissionGate::DequeueExpired(Account& account, Instant now,
                                   std::vector<Decision>& decisions) {
  for (auto it = account.queue.begin(); it != account.queue.end();) {
    absl::Status status = CheckAlive(it->second, now);
    if (status.ok()) {
      ++it;
    } else {
      it = Dequeue(account, it, std::move(status), decisions);
    }
  }
}

AdmissionGate::Queued::iterator AdmissionGate::Dequeue(Account& account, Queued::iterator waiter,
                                                       Result result,
                                                       std::vector<Decision>& decisions) {
  decisions.push_back({std::move(waiter->second.callback), std::move(result)});
  --waiting_;
  return account.queue.erase(waiter);
}

void AdmissionGate::WakeIfQueued() {
  if (waiting_.load() > 0) alarm_.SetNoLaterThan(clock_.Now());
}

void AdmissionGate::ExportTo(MetricSink& sink) const {
  sink.AddGauge("rapt_memory_budget_bytes", "Memory budget of all requests.", {},
                [this] { return capacity_bytes(); });
  for (const auto& [kind, share] :
       {std::pair("receive", Share::kReceive), std::pair("compute", Share::kCompute)}) {
    sink.AddGauge("rapt_memory_reserved_bytes",
                  "Reserved bytes: for received messages, and for outputs and workspace.",
                  {{"kind", kind}}, [this, share = share] { return reserved_bytes(share); });
    sink.AddGauge("rapt_memory_limit_bytes", "Bytes that large requests may reserve.",
                  {{"kind", kind}}, [this, share = share] { return LimitOf(share); });
  }
  ExportQueue(
      "memory", [this] { return waiting(); }, sink);
}

}  // namespace rapt
