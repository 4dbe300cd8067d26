#include "server/admission/fair_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "absl/container/flat_hash_set.h"
#include "server/request.h"

namespace rapt {
namespace {

bool IsWithin(int64_t fair_share, const WaitingRequest& request) {
  if (request.caller == nullptr) return true;
  const int64_t held = request.caller->held();
  return held == 0 || (held <= fair_share && request.bytes <= fair_share - held);
}

// Selects the requests that are served first, when it is asked for each in order.
class FirstGroup {
 public:
  explicit FirstGroup(int64_t fair_share) : fair_share_(fair_share) {}

  bool Contains(const WaitingRequest& request) {
    if (request.yields) return false;
    if (passed_over_.contains(request.caller.get())) return false;
    if (IsWithin(fair_share_, request)) return true;
    // Later small requests would keep the caller's memory from falling enough for this one.
    passed_over_.insert(request.caller.get());
    return false;
  }

 private:
  const int64_t fair_share_;
  absl::flat_hash_set<const CallerBytes*> passed_over_;
};

}  // namespace

void FairQueue::Add(Entry entry) {
  const auto level = static_cast<int64_t>(PriorityLevel(entry->priority));
  ++waiting_[entry->caller.get()];
  const Instant rank = entry->since + level * level_delay_;
  entries_.emplace(rank, std::move(entry));
}

void FairQueue::Forget(const CallerBytes* caller) {
  const auto count = waiting_.find(caller);
  if (--count->second == 0) waiting_.erase(count);
}

// At least 1.
int64_t FairQueue::Callers() const {
  int64_t callers = holders_.load();
  for (const auto& [caller, count] : waiting_) {
    if (caller == nullptr || caller->held() == 0) ++callers;
  }
  return std::max<int64_t>(callers, 1);
}

int64_t FairQueue::FairShare() const { return capacity_bytes_ / Callers(); }

bool FairQueue::IsHeldBack(const WaitingRequest& request) const {
  if (request.caller == nullptr || !request.caller->is_confined()) return false;
  return request.bytes > capacity_bytes_ / (Callers() + 1) - request.caller->held();
}

bool FairQueue::WouldBeFirst(const WaitingRequest& request) const {
  if (IsHeldBack(request)) return false;
  if (entries_.empty()) return true;
  FirstGroup first(FairShare());
  for (const auto& [rank, entry] : entries_) {
    if (!IsHeldBack(*entry) && first.Contains(*entry)) return false;
  }
  return first.Contains(request);
}

void FairQueue::Offer(absl::FunctionRef<bool(const WaitingRequest&)> is_meant,
                      absl::FunctionRef<bool(Entry&)> take) {
  const auto may_take = [&](const WaitingRequest& request) {
    return is_meant(request) && !IsHeldBack(request);
  };
  FirstGroup first(FairShare());
  const auto is_first = [&](const WaitingRequest& request) {
    return may_take(request) && first.Contains(request);
  };
  if (OfferTo(is_first, take)) OfferTo(may_take, take);
}

// Returns false if `take` did.
bool FairQueue::OfferTo(absl::FunctionRef<bool(const WaitingRequest&)> is_meant,
                        absl::FunctionRef<bool(Entry&)> take) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry& entry = it->second;
    if (!is_meant(*entry)) {
      ++it;
      continue;
    }
    const CallerBytes* const caller = entry->caller.get();
    if (!take(entry)) return false;
    it = entries_.erase(it);
    Forget(caller);
  }
  return true;
}

void FairQueue::RemoveIf(absl::FunctionRef<bool(Entry&)> take) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    const CallerBytes* const caller = it->second->caller.get();
    if (take(it->second)) {
      it = entries_.erase(it);
      Forget(caller);
    } else {
      ++it;
    }
  }
}

int64_t FairQueue::CountOf(const CallerBytes* caller) const {
  const auto count = waiting_.find(caller);
  return count == waiting_.end() ? 0 : count->second;
}

FairQueue::Entry FairQueue::Displace(int64_t count) {
  const auto most = std::max_element(waiting_.begin(), waiting_.end(),
                                     [](auto& a, auto& b) { return a.second < b.second; });
  if (most == waiting_.end() || most->second < count + 2) return nullptr;
  const CallerBytes* const caller = most->first;
  const auto last = std::find_if(entries_.rbegin(), entries_.rend(), [caller](auto& entry) {
    return entry.second->caller.get() == caller;
  });
  Entry displaced = std::move(last->second);
  entries_.erase(std::prev(last.base()));
  Forget(caller);
  return displaced;
}

Instant FairQueue::OldestWithinShare() const {
  FirstGroup first(FairShare());
  Instant oldest = Instant::max();
  for (const auto& [rank, entry] : entries_) {
    if (IsHeldBack(*entry)) continue;
    if (entry->yields || first.Contains(*entry)) oldest = std::min(oldest, entry->since);
  }
  return oldest;
}

}  // namespace rapt
