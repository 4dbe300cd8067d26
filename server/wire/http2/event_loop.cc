#include "server/wire/http2/event_loop.h"

#include <pthread.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <array>
#include <chrono>

#include "base/check.h"

namespace rapt {
namespace {

// For top, gdb and perf.
constexpr char kThreadName[] = "rapt-wire";

constexpr std::chrono::milliseconds kTick{1000};
constexpr size_t kScratchBytes = 64 * 1024;  // stays in the second-level cache
constexpr int kEvents = 128;
constexpr int kHeavyTurns = 2;

}  // namespace

EventLoop::EventLoop(const Clock& clock)
    : clock_(clock),
      epoll_(epoll_create1(EPOLL_CLOEXEC)),
      wake_(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      scratch_(kScratchBytes) {
  epoll_event event = {};
  event.events = EPOLLIN;
  event.data.ptr = nullptr;
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

void EventLoop::Add(int descriptor, uint32_t events, std::shared_ptr<Watcher> watcher) {
  epoll_event event = {};
  event.events = events;
  event.data.ptr = watcher.get();
  const int error = epoll_ctl(epoll_.get(), EPOLL_CTL_ADD, descriptor, &event);
  RAPT_CHECK(error == 0, "a socket can't be watched");
  watchers_[descriptor] = std::move(watcher);
}

void EventLoop::Change(int descriptor, uint32_t events) {
  epoll_event event = {};
  event.events = events;
  event.data.ptr = watchers_.at(descriptor).get();
  epoll_ctl(epoll_.get(), EPOLL_CTL_MOD, descriptor, &event);
}

void EventLoop::Remove(int descriptor) {
  const auto found = watchers_.find(descriptor);
  if (found == watchers_.end()) return;
  epoll_ctl(epoll_.get(), EPOLL_CTL_DEL, descriptor, nullptr);
  removed_.push_back(std::move(found->second));
  watchers_.erase(found);
}

void EventLoop::Serve() {
  thread_id_ = std::this_thread::get_id();
  pthread_setname_np(pthread_self(), kThreadName);
  next_tick_ = clock_.Now() + kTick;
  for (;;) {
    Wait();
    RunPosted();
    Tick();
    EndRound();
    MutexLock lock(mutex_);
    if (stopping_ && posted_.empty()) return;
  }
}

void EventLoop::Wait() {
  std::array<epoll_event, kEvents> events;
  const int count =
      epoll_wait(epoll_.get(), events.data(), kEvents, static_cast<int>(kTick.count()));
  heavy_turns_ = kHeavyTurns;
  for (int i = 0; i < count; ++i) {
    const epoll_event& event = events[static_cast<size_t>(i)];
    if (event.data.ptr != nullptr) {
      static_cast<Watcher*>(event.data.ptr)->OnEvents(event.events);
    } else {
      eventfd_t value;
      eventfd_read(wake_.get(), &value);
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

void EventLoop::Tick() {
  const Instant now = clock_.Now();
  if (now < next_tick_) return;
  next_tick_ = now + kTick;
  std::vector<std::shared_ptr<Watcher>> watchers;  // a watcher may remove itself
  for (const auto& [descriptor, watcher] : watchers_) watchers.push_back(watcher);
  for (const auto& watcher : watchers) watcher->OnTick(now);
}

void EventLoop::EndRound() {
  for (size_t i = 0; i < round_end_.size(); ++i) {  // it may grow
    const std::shared_ptr<Watcher> watcher = round_end_[i];
    watcher->OnRoundEnd();
  }
  round_end_.clear();
  removed_.clear();
}

}  // namespace rapt
