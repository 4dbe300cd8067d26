#include "server/admission/fair_queue.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "server/request.h"

namespace rapt {

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

int64_t FairQueue::FairShare() const {
  int64_t callers = holders_.load();
  for (const auto& [caller, count] : waiting_) {
    if (caller == nullptr || caller->held() == 0) ++callers;
  }
  return capacity_bytes_ / std::max<int64_t>(callers, 1);
}

bool FairQueue::IsWithin(int64_t fair_share, const WaitingRequest& request) {
  if (request.caller == nullptr) return true;
  const int64_t held = request.caller->held();
  return held == 0 || (held <= fair_share && request.bytes <= fair_share - held);
}

void FairQueue::Offer(absl::FunctionRef<bool(const WaitingRequest&)> is_meant,
                      absl::FunctionRef<bool(Entry&)> take) {
  const int64_t fair_share = FairShare();
  if (OfferTo(/*within_share=*/true, fair_share, is_meant, take)) {
    OfferTo(/*within_share=*/false, fair_share, is_meant, take);
  }
}

// Returns false if `take` did.
bool FairQueue::OfferTo(bool within_share, int64_t fair_share,
                        absl::FunctionRef<bool(const WaitingRequest&)> is_meant,
                        absl::FunctionRef<bool(Entry&)> take) {
  for (auto it = entries_.begin(); it != entries_.end();) {
    Entry& entry = it->second;
    if (!is_meant(*entry) || IsWithin(fair_share, *entry) != within_share) {
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

FairQueue::Entry FairQueue::Displace(const CallerBytes* newcomer) {
  const auto own = waiting_.find(newcomer);
  const auto most = std::max_element(waiting_.begin(), waiting_.end(),
                                     [](auto& a, auto& b) { return a.second < b.second; });
  const int64_t own_count = own == waiting_.end() ? 0 : own->second;
  if (most == waiting_.end() || most->second < own_count + 2) return nullptr;
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
  const int64_t fair_share = FairShare();
  Instant oldest = Instant::max();
  for (const auto& [rank, entry] : entries_) {
    if (IsWithin(fair_share, *entry)) oldest = std::min(oldest, entry->since);
  }
  return oldest;
}

}  // namespace rapt
