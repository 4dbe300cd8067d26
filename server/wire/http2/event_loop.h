// A thread that waits for sockets.
#ifndef RAPT_SERVER_WIRE_HTTP2_EVENT_LOOP_H_
#define RAPT_SERVER_WIRE_HTTP2_EVENT_LOOP_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/container/flat_hash_map.h"
#include "absl/functional/any_invocable.h"
#include "absl/types/span.h"
#include "base/clock.h"
#include "base/descriptor.h"
#include "base/mutex.h"

namespace rapt {

// Level-triggered epoll. Post() and IsInLoop() are thread-safe; the other functions belong to the
// loop's thread.
class EventLoop {
 public:
  using Task = absl::AnyInvocable<void()>;

  class Watcher {
   public:
    virtual ~Watcher() = default;
    virtual void OnEvents(uint32_t events) = 0;  // EPOLLIN, ...
    virtual void OnTick(Instant now) = 0;        // about once a second
    virtual void OnRoundEnd() {}                 // after AtRoundEnd()
  };

  explicit EventLoop(const Clock& clock);
  ~EventLoop() { Stop(); }
  EventLoop(const EventLoop&) = delete;
  EventLoop& operator=(const EventLoop&) = delete;

  void Start();
  // Runs the posted tasks and ends the thread.
  void Stop();

  void Post(Task task);
  bool IsInLoop() const { return std::this_thread::get_id() == thread_id_.load(); }
  // Runs the task now if this is the loop's thread, else posts it.
  template <typename Function>
  void Run(Function task) {
    if (IsInLoop()) return task();
    Post(std::move(task));
  }

  // Watches the descriptor until Remove(); the watcher stays alive until then, and until the end of
  // the round.
  void Add(int descriptor, uint32_t events, std::shared_ptr<Watcher> watcher);
  void Change(int descriptor, uint32_t events);
  void Remove(int descriptor);

  // Calls watcher.OnRoundEnd() once before the loop waits again.
  void AtRoundEnd(std::shared_ptr<Watcher> watcher) { round_end_.push_back(std::move(watcher)); }

  // Returns whether the caller may compute for about a millisecond, as for a handshake. A few may
  // in each round, so that other watchers are not delayed.
  bool TakeHeavyTurn() { return heavy_turns_-- > 0; }

  // A scratch buffer, valid until the watcher returns.
  absl::Span<uint8_t> scratch() { return absl::MakeSpan(scratch_); }

  const Clock& clock() const { return clock_; }

 private:
  void Serve();
  void Wait();
  void RunPosted();
  void Tick();
  void EndRound();

  const Clock& clock_;
  const Descriptor epoll_;
  const Descriptor wake_;
  absl::flat_hash_map<int, std::shared_ptr<Watcher>> watchers_;
  std::vector<std::shared_ptr<Watcher>> removed_, round_end_;
  std::vector<uint8_t> scratch_;
  Instant next_tick_;
  int heavy_turns_ = 0;  // left in this round

  Mutex mutex_;
  std::vector<Task> posted_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<std::thread::id> thread_id_{};
  std::thread thread_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_HTTP2_EVENT_LOOP_H_
