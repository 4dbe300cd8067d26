#include "server/admission/gate.h"

#include <algorithm>
#include <future>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "server/rejection.h"
#include "server/request.h"

namespace rapt {
namespace {

constexpr int64_t kSmallPart = 64;    // a small request takes at most 1/64 of the budget
constexpr int64_t kReservedPart = 8;  // 1/8 of the budget is reserved for small requests
constexpr int64_t kShares = 2;
constexpr int64_t kLongParts = 4;  // 1/4 of the compute share is left to requests

// The longest head start by priority is less than the time that a request may wait: no request is
// rejected only because others are more urgent.
constexpr int kLevelsOfQueueDelay = 16;

// Calls need a moment to release their memory, and a search visits all calls that wait.
constexpr std::chrono::milliseconds kPauseBetweenSearches{10};

int64_t SmallBytes(int64_t budget) { return budget / kReservedPart / kShares; }
int64_t GeneralBytes(int64_t budget) { return budget / kShares - SmallBytes(budget); }

absl::string_view NameOf(const AdmissionGate::MemoryRequest& request) {
  if (!request.what.empty()) return request.what;
  return request.share == AdmissionGate::Share::kReceive ? "message"
                                                         : "memory for outputs and workspace";
}

}  // namespace

AdmissionGate::AdmissionGate(const Options& options, Timer& timer, const Clock& clock)
    : options_(options),
      clock_(clock),
      receive_(options, [this] { WakeIfQueued(); }),
      compute_(options, [this] { WakeIfQueued(); }),
      alarm_(timer, [this] { Serve(); }) {}

AdmissionGate::Account::Account(const Options& options, const std::function<void()>& on_release)
    : general(GeneralBytes(options.budget_bytes), on_release),
      small(SmallBytes(options.budget_bytes), on_release, /*for_small=*/true),
      queue(general.capacity_bytes() + small.capacity_bytes(), holders,
            options.max_queue_delay / kLevelsOfQueueDelay) {}

std::shared_ptr<CallerMemory> AdmissionGate::CallerOf(const std::string& name) {
  MutexLock lock(callers_mutex_);
  std::weak_ptr<CallerMemory>& known = callers_[name];
  std::shared_ptr<CallerMemory> caller = known.lock();
  if (caller != nullptr) return caller;
  known = caller = std::make_shared<CallerMemory>(receive_.holders, compute_.holders);
  if (callers_.size() > most_callers_) {
    absl::erase_if(callers_, [](const auto& entry) { return entry.second.expired(); });
    most_callers_ = std::max(most_callers_, 2 * callers_.size());
  }
  return caller;
}

std::shared_ptr<CallerBytes> AdmissionGate::BytesOf(const std::shared_ptr<CallerMemory>& caller,
                                                    Share share) {
  if (caller == nullptr) return nullptr;
  return {caller, share == Share::kReceive ? &caller->receive : &caller->compute};
}

void AdmissionGate::Describe(const MemoryRequest& request, WaitingRequest& waiting) {
  waiting.caller = BytesOf(request.caller, request.share);
  waiting.bytes = request.bytes;
  waiting.priority = request.priority;
  waiting.yields = request.yields;
}

AdmissionGate::Waiter& AdmissionGate::AsWaiter(const FairQueue::Entry& entry) {
  return static_cast<Waiter&>(*entry);  // the queue has no others
}

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
  for (const FairQueue* queue : {&receive_.queue, &compute_.queue}) {
    queue->ForEach([&](const WaitingRequest& request) {
      ++state.depth;
      state.oldest_age = std::max(state.oldest_age, now - request.since);
    });
  }
  return state;
}

bool AdmissionGate::IsSmall(int64_t bytes) const {
  return bytes <= options_.budget_bytes / kSmallPart;
}

bool AdmissionGate::MayUseSmall(const Account& account, const WaitingRequest& request) const {
  if (!IsSmall(request.bytes) || request.yields) return false;
  if (request.caller == nullptr) return true;
  const int64_t left = account.small.free_bytes() - request.bytes;
  return request.caller->held_for_small() + request.bytes <= left;
}

absl::Status AdmissionGate::CheckFitsShare(const MemoryRequest& request) const {
  if (request.bytes <= LimitOf(request.share)) return absl::OkStatus();
  return Reject(Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
                absl::StrCat("the ", NameOf(request), " needs ", request.bytes, " bytes; at most ",
                             LimitOf(request.share), " of the memory budget of ",
                             options_.budget_bytes, " are allowed"));
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
                  absl::StrCat("the ", NameOf(request), " needs ", request.bytes,
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
  EndConfinements();
  WaitingRequest newcomer;
  Describe(request, newcomer);
  std::optional<MemoryBudget::Reservation> reservation;
  if (account.queue.WouldBeFirst(newcomer)) {
    reservation = account.general.Reserve(newcomer.bytes, newcomer.caller);
  }
  if (reservation || !MayUseSmall(account, newcomer)) return reservation;
  bool small_queued = false;
  account.queue.ForEach([&](const WaitingRequest& other) {
    small_queued = small_queued || (other.caller == newcomer.caller && IsSmall(other.bytes));
  });
  if (!small_queued) reservation = account.small.Reserve(newcomer.bytes, newcomer.caller);
  return reservation;
}

absl::StatusOr<MemoryBudget::Reservation> AdmissionGate::ReserveBehindCalls(
    int64_t bytes, absl::string_view what) {
  if (bytes == 0) return MemoryBudget::Reservation();  // nothing to wait for
  const MemoryRequest request = {.bytes = bytes, .yields = true, .what = what};
  std::optional<Result> result = AdmitNow(request);
  if (!result) {
    std::promise<Result> decided;
    std::future<Result> decision = decided.get_future();
    Queue(request,
          [decided = std::move(decided)](Result r) mutable { decided.set_value(std::move(r)); });
    result = decision.get();
  }
  if (!result->ok()) return result->status();
  return std::move((*result)->reservation);
}

absl::StatusOr<AdmissionGate::LongReservation> AdmissionGate::ReserveForLong(int64_t bytes) {
  const int64_t most = compute_.general.capacity_bytes() / kLongParts * (kLongParts - 1);
  const int64_t held = long_reserved_bytes();
  if (bytes > most - held) {
    return Reject(
        Rejection::kTooLarge, absl::StatusCode::kResourceExhausted,
        absl::StrCat("the weights need ", bytes, " bytes beside ", held,
                     " bytes of other weights; at most ", most, " of the memory budget of ",
                     options_.budget_bytes, " are allowed for all weights"));
  }
  RAPT_ASSIGN_OR_RETURN(MemoryBudget::Reservation reserved,
                        ReserveBehindCalls(bytes, "memory for weights"));
  long_reserved_ += bytes;
  WakeIfQueued();  // requests that wait may never fit now
  return LongReservation(this, std::move(reserved));
}

void AdmissionGate::Queue(const MemoryRequest& request, Callback callback) {
  const Instant now = clock_.Now();
  auto waiter = std::make_unique<Waiter>();
  Describe(request, *waiter);
  waiter->since = now;
  waiter->request = request;
  waiter->callback = std::move(callback);
  waiter->queue_end = now + options_.max_queue_delay;
  if (absl::Status status = CheckAlive(*waiter, now); !status.ok()) {
    return waiter->callback(std::move(status));
  }
  FairQueue::Entry rejected = Enqueue(std::move(waiter));
  if (rejected == nullptr) return;
  const MemoryRequest& lost = AsWaiter(rejected).request;
  AsWaiter(rejected).callback(
      Reject(Rejection::kQueueFull, absl::StatusCode::kResourceExhausted,
             absl::StrCat("the ", NameOf(lost), " needs ", lost.bytes,
                          " bytes, which are not free now, and the queue is full with ",
                          options_.max_queued, " requests")));
}

// Returns the request for which the queue has no place: this one, or one of a caller with more
// requests.
FairQueue::Entry AdmissionGate::Enqueue(FairQueue::Entry entry) {
  const Instant now = entry->since;
  const MemoryRequest& request = AsWaiter(entry).request;
  MutexLock lock(mutex_);
  FairQueue::Entry displaced;
  if (waiting_.load() >= options_.max_queued) {
    displaced = Displace(request);
    if (displaced == nullptr) return entry;
    --waiting_;
  }
  ++waiting_;  // before Serve() checks for free bytes, see MemoryBudget
  account(request.share).queue.Add(std::move(entry));
  alarm_.SetNoLaterThan(now);  // bytes may have been released meanwhile
  return displaced;
}

// Prefers the queue of the same share. Both have one limit.
FairQueue::Entry AdmissionGate::Displace(const MemoryRequest& newcomer) {
  const auto count_in = [&](Share share) {
    return account(share).queue.CountOf(BytesOf(newcomer.caller, share).get());
  };
  const int64_t count = count_in(Share::kReceive) + count_in(Share::kCompute);
  FairQueue::Entry displaced = account(newcomer.share).queue.Displace(count);
  if (displaced != nullptr) return displaced;
  const bool receives = newcomer.share == Share::kReceive;
  return account(receives ? Share::kCompute : Share::kReceive).queue.Displace(count);
}

void AdmissionGate::Serve() {
  if (waiting_.load() == 0) return;
  std::vector<Decision> decisions;
  {
    MutexLock lock(mutex_);
    const Instant receive = Decide(Share::kReceive, decisions);
    const Instant compute = Decide(Share::kCompute, decisions);
    alarm_.SetNoLaterThan(std::min(receive, compute));
    if (!confinements_.empty()) alarm_.SetNoLaterThan(confinements_.front().end);
  }
  for (Decision& decision : decisions) decision.callback(std::move(decision.result));
}

Instant AdmissionGate::Decide(Share share, std::vector<Decision>& decisions) {
  Account& account = this->account(share);
  if (account.queue.empty()) return Instant::max();
  const Instant now = clock_.Now();
  EndConfinements();
  DequeueExpired(account, now, decisions);
  const auto take_from = [&](MemoryBudget& budget) {
    return [&, this](FairQueue::Entry& entry) {
      auto reservation = budget.Reserve(entry->bytes, entry->caller);
      if (!reservation) return false;
      Admission admission{*std::move(reservation), now - entry->since};
      Dequeue(std::move(entry), std::move(admission), decisions);
      return true;
    };
  };
  account.queue.Offer([](const WaitingRequest&) { return true; }, take_from(account.general));
  account.queue.Offer(
      [&, this](const WaitingRequest& request) { return MayUseSmall(account, request); },
      take_from(account.small));
  Instant next = EndSilentCall(share, now);
  account.queue.ForEach([&next](const WaitingRequest& request) {
    next = std::min(next, static_cast<const Waiter&>(request).limit());
  });
  return next;
}

void AdmissionGate::DequeueExpired(Account& account, Instant now,
                                   std::vector<Decision>& decisions) {
  account.queue.RemoveIf([&](FairQueue::Entry& entry) {
    absl::Status status = CheckAlive(AsWaiter(entry), now);
    // A long reservation that was made meanwhile may have put it out of reach.
    status.Update(CheckFitsShare(AsWaiter(entry).request));
    if (status.ok()) return false;
    Dequeue(std::move(entry), std::move(status), decisions);
    return true;
  });
}

void AdmissionGate::Dequeue(FairQueue::Entry entry, Result result,
                            std::vector<Decision>& decisions) {
  decisions.push_back({std::move(AsWaiter(entry).callback), std::move(result)});
  --waiting_;
}

Instant AdmissionGate::EndSilentCall(Share share, Instant now) {
  Account& account = this->account(share);
  const Instant oldest = account.queue.OldestWithinShare();
  if (oldest == Instant::max()) return Instant::max();
  const Instant earliest = std::max(oldest + kSilentTime, account.next_search_of_a_call);
  if (now < earliest) return earliest;
  account.next_search_of_a_call = now + kPauseBetweenSearches;
  const int64_t fair_share = account.queue.FairShare();
  for (auto it = waiting_calls_.begin(); it != waiting_calls_.end(); ++it) {
    const Instant silent_at = it->first.first;
    WaitingCall& call = it->second;
    CallerBytes* const bytes = call.Held(share);
    if (bytes == nullptr || bytes->held() <= fair_share) continue;
    const bool is_only = bytes->reservations() == 1;
    if (is_only && (call.pace == nullptr || now < call.pace->silent_at())) continue;
    if (now < silent_at) return std::max(silent_at, account.next_search_of_a_call);
    call.end();
    Confine({call.caller, bytes}, now);
    waiting_calls_.erase(it);
    break;
  }
  return account.next_search_of_a_call;
}

AdmissionGate::PeerWait AdmissionGate::WaitForPeer(std::shared_ptr<CallerMemory> caller,
                                                   Shares shares, Instant silent_at,
                                                   absl::AnyInvocable<void()> end,
                                                   const PeerPace* pace) {
  MutexLock lock(mutex_);
  const PeerWait::Key key = {silent_at, next_wait_++};
  waiting_calls_.emplace(key, WaitingCall{std::move(caller), shares, std::move(end), pace});
  if (waiting_.load() > 0) alarm_.SetNoLaterThan(silent_at);
  return {this, key};
}

// Prolongs a confinement that exists. No more exist than calls were ended or silent in that time.
void AdmissionGate::Confine(std::shared_ptr<CallerBytes> caller, Instant now) {
  if (caller->is_confined()) {
    std::erase_if(confinements_, [&](const Confinement& c) { return c.caller == caller; });
  }
  caller->set_confined(true);
  confinements_.push_back({now + kConfinedTime, std::move(caller)});
}

bool AdmissionGate::HasSilentCall(const CallerBytes* caller, Instant now) const {
  for (const auto& [key, call] : waiting_calls_) {
    if (key.first > now) return false;
    if (call.Held(Share::kReceive) == caller || call.Held(Share::kCompute) == caller) return true;
  }
  return false;
}

// A caller with a silent call would regain the memory at once, and the others would wait again.
void AdmissionGate::EndConfinements() {
  if (confinements_.empty()) return;
  const Instant now = clock_.Now();
  while (!confinements_.empty() && confinements_.front().end <= now) {
    std::shared_ptr<CallerBytes> caller = std::move(confinements_.front().caller);
    confinements_.pop_front();
    caller->set_confined(false);
    if (HasSilentCall(caller.get(), now)) Confine(std::move(caller), now);
  }
}

void AdmissionGate::EndWait(const PeerWait::Key& key) {
  MutexLock lock(mutex_);
  const auto found = waiting_calls_.find(key);
  if (found == waiting_calls_.end()) return;
  const WaitingCall& call = found->second;
  for (const Share share : {Share::kReceive, Share::kCompute}) {
    CallerBytes* const bytes = call.Held(share);
    if (bytes == nullptr || !bytes->is_confined()) continue;
    const Instant now = clock_.Now();
    if (key.first <= now) Confine({call.caller, bytes}, now);
  }
  waiting_calls_.erase(found);
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
  sink.AddGauge("rapt_model_weights_bytes",
                "Reserved bytes of weights, those of replaced models in use included.", {},
                [this] { return long_reserved_bytes(); });
  ExportQueue(
      "memory", [this] { return waiting(); }, sink);
}

}  // namespace rapt
