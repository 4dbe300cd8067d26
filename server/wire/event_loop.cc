#include "server/wire/event_loop.h"

#include <pthread.h>
#include <sys/eventfd.h>

#include <algorithm>
#include <chrono>

#include "base/check.h"

namespace rapt {
namespace {

constexpr std::chrono::milliseconds kTick{1000};
constexpr size_t kScratchBytes = 64 * 1024;  // stays in the second-level cache
// Reported at a time. epoll reports the others in the next rounds, whatever their network.
constexpr size_t kEvents = 4096;
// Turns begin for this long before the loop looks for events and tasks again, which takes longer if
// many descriptors are ready.
constexpr std::chrono::milliseconds kRoundTime{1};
constexpr size_t kHeavyTurns = 2;  // in a round

}  // namespace

EventLoop::EventLoop(const Clock& clock, const char* thread_name)
    : clock_(clock),
      thread_name_(thread_name),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      events_(kEvents),
      scratch_(kScratchBytes) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.fd = wake_.get();
  RAPT_CHECK(epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, wake_.get(), &event) == 0, "no epoll");
}

void EventLoop::Start() {
  thread_ = std::thread([this] { Serve(); });
}

void EventLoop::Stop() {
  if (!thread_.joinable()) return;
  Post([this] {
    MutexLock lock(mutex_);
    stopping_ = true;
  });
  thread_.join();
}

void EventLoop::Post(Task task) {
  MutexLock lock(mutex_);
  posted_.push_back(std::move(task));
  // Under the lock: as soon as it is released, the task may run and the loop be destroyed.
  if (posted_.size() == 1) eventfd_write(wake_.get(), 1);
}

void EventLoop::Add(int descriptor, uint32_t events, std::shared_ptr<Watcher> watcher,
                    const PeerNetwork& network) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = descriptor;
  const int error = epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event);
  RAPT_CHECK(error == 0, "a socket can't be watched");
  watcher->network_ = network;
  watcher->is_watched_ = true;
  watchers_[descriptor] = std::move(watcher);
}

void EventLoop::Change(int descriptor, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.fd = descriptor;
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, descriptor, &event);
}

void EventLoop::Remove(int descriptor) {
  const auto found = watchers_.find(descriptor);
  if (found == watchers_.end()) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, descriptor, nullptr);
  found->second->is_watched_ = false;
  removed_.push_back(std::move(found->second));
  watchers_.erase(found);
}

void EventLoop::RequestTurn(std::shared_ptr<Watcher> watcher, uint32_t events) {
  watcher->events_ |= events;
  if (std::exchange(watcher->waits_, true)) return;
  TurnQueue<std::shared_ptr<Watcher>>& queue = watcher->NextTurnIsHeavy() ? heavy_ : ready_;
  const PeerNetwork network = watcher->network_;
  queue.Push(network, std::move(watcher));
}

void EventLoop::Serve() {
  thread_id_ = std::this_thread::get_id();
  pthread_setname_np(pthread_self(), thread_name_);
  next_tick_ = clock_.Now() + kTick;
  for (;;) {
    Wait();
    RunPosted();
    TakeTurns();
    Tick();
    removed_.clear();
    MutexLock lock(mutex_);
    if (stopping_ && posted_.empty()) return;
  }
}

// Queues the watchers that are ready for their turns. Does not block if turns are pending.
void EventLoop::Wait() {
  const auto timeout = ready_.empty() && heavy_.empty() ? kTick : std::chrono::milliseconds(0);
  const int count = epoll_wait(epoll_.get(), events_.data(), static_cast<int>(events_.size()),
                               static_cast<int>(timeout.count()));
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events_[static_cast<size_t>(i)];
    if (event.data.fd == wake_.get()) {
      eventfd_t value;
      eventfd_read(wake_.get(), &value);
    } else {
      RequestTurn(watchers_.at(event.data.fd), event.events);
    }
  }
}

void EventLoop::RunPosted() {
  std::vector<Task> tasks;
  {
    MutexLock lock(mutex_);
    tasks.swap(posted_);
  }
  for (Task& task : tasks) task();
}

// Watchers that become ready meanwhile have their turn in the next round.
void EventLoop::TakeTurns() {
  const Instant began = clock_.Now();
  for (size_t left = ready_.size(); left > 0 && clock_.Now() - began < kRoundTime; --left) {
    TakeTurn(*ready_.Pop());
  }
  for (size_t left = std::min(heavy_.size(), kHeavyTurns); left > 0; --left)
    TakeTurn(*heavy_.Pop());
}

void EventLoop::TakeTurn(Watcher& watcher) {
  watcher.waits_ = false;
  const uint32_t events = std::exchange(watcher.events_, 0);
  if (watcher.is_watched_) watcher.OnEvents(events);
}

void EventLoop::Tick() {
  const Instant now = clock_.Now();
  if (now < next_tick_) return;
  next_tick_ = now + kTick;
  std::vector<std::shared_ptr<Watcher>> watchers;  // a watcher may remove itself
  for (const auto& [descriptor, watcher] : watchers_) watchers.push_back(watcher);
  for (const auto& watcher : watchers) watcher->OnTick(now);
}

}  // namespace rapt
