#include "server/execution/scheduling_policy.h"

#include <algorithm>
#include <tuple>
#include <utility>

#include "server/request.h"

namespace rapt {
namespace {

std::chrono::nanoseconds HeadStartOf(uint64_t priority) {
  return (static_cast<int>(kDefaultPriority) - static_cast<int>(PriorityLevel(priority))) *
         SchedulingPolicy::kPriorityStep;
}

}  // namespace

SchedulingPolicy::Entry::Entry(Job job_in, Instant submitted_in)
    : job(std::move(job_in)), submitted(submitted_in), head_start(HeadStartOf(job.priority)) {}

bool SchedulingPolicy::Before::operator()(const Entry* a, const Entry* b) const {
  return std::tuple(a->rank(), a->sequence) < std::tuple(b->rank(), b->sequence);
}

void SchedulingPolicy::Add(Entry* entry) {
  ++jobs_;
  entry->virtual_time = virtual_now_;
  entry->sequence = next_sequence_++;
  const std::string& group = entry->job.batch_group.name;
  if (!group.empty()) groups_[group].insert(entry);
  runnable_.insert(entry);
}

SchedulingPolicy::Entries SchedulingPolicy::Take(bool may_batch,
                                                 absl::FunctionRef<bool(const Entry&)> is_alive) {
  Entry* const first = *runnable_.begin();
  Entries batch = {first};
  if (may_batch && first->is_waiting() && is_alive(*first)) batch = ChooseBatch(first, is_alive);
  for (Entry* entry : batch) {
    Start(entry);
    if (batch.size() > 1) Pause(entry);  // its only task is handed out
  }
  return batch;
}

SchedulingPolicy::Entries SchedulingPolicy::ChooseBatch(
    Entry* first, absl::FunctionRef<bool(const Entry&)> is_alive) const {
  Entries batch = {first};
  const auto group = groups_.find(first->job.batch_group.name);
  if (group == groups_.end()) return batch;
  double capacity = 1 - first->job.batch_group.batch_cost;
  int skipped = 0;
  for (Entry* entry : group->second) {
    if (entry == first) continue;
    const double cost = entry->job.batch_group.batch_cost;
    // A cancelled or late job fails when it is taken alone.
    if (cost <= capacity && is_alive(*entry)) {
      capacity -= cost;
      batch.push_back(entry);
    } else if (++skipped == kMaxSkipped) {
      break;
    }
  }
  return batch;
}

SchedulingPolicy::Entry* SchedulingPolicy::TakeInterrupting(const Entry& running) {
  for (Entry* next : runnable_) {
    if (next->rank() >= running.rank()) break;
    if (next->job.task_cost * kMuchLonger > running.job.task_cost) continue;
    Start(next);
    return next;
  }
  return nullptr;
}

void SchedulingPolicy::Start(Entry* entry) {
  // An urgent job may have consumed its head start, which must not delay new jobs.
  virtual_now_ = std::max(virtual_now_, std::min(entry->virtual_time, entry->rank()));
  if (!entry->is_waiting()) return;
  entry->started = clock_.Now();
  const auto group = groups_.find(entry->job.batch_group.name);
  if (group == groups_.end()) return;
  group->second.erase(entry);
  if (group->second.empty()) groups_.erase(group);
}

void SchedulingPolicy::Charge(Entry* entry, Instant begin) {
  const std::chrono::nanoseconds used = clock_.Now() - begin;
  auto place = runnable_.extract(entry);  // before its rank changes
  entry->virtual_time += used;
  if (!place.empty()) runnable_.insert(std::move(place));
  Advance(used);
}

// Advances by the fair share of each job, so that a steady flow of new jobs soon equals old ones.
void SchedulingPolicy::Advance(std::chrono::nanoseconds used) { virtual_now_ += used / jobs_; }

QueueState SchedulingPolicy::waiting() const {
  const Instant now = clock_.Now();
  QueueState state;
  for (const Entry* entry : runnable_) {
    if (!entry->is_waiting()) continue;
    ++state.depth;
    state.oldest_age = std::max(state.oldest_age, now - entry->submitted);
  }
  return state;
}

}  // namespace rapt
