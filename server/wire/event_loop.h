// A thread that waits for sockets and divides its time among the networks of their peers.
#ifndef RAPT_SERVER_WIRE_EVENT_LOOP_H_
#define RAPT_SERVER_WIRE_EVENT_LOOP_H_

#include <sys/epoll.h>

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
#include "server/wire/connection_counts.h"
#include "server/wire/turn_queue.h"

namespace rapt {

// Level-triggered epoll. Watchers that are ready take turns: networks in turn, and the watchers of
// a network in turn, so that many connections of one network do not delay another network. Post()
// and IsInLoop() are thread-safe; the other functions belong to the loop's thread.
class EventLoop {
 public:
  using Task = absl::AnyInvocable<void()>;

  class Watcher {
   public:
    virtual ~Watcher() = default;
    // A turn. `events`: EPOLLIN, ...; those of RequestTurn() too. Should return after about a
    // millisecond; the loop reports the descriptor again.
    virtual void OnEvents(uint32_t events) = 0;
    virtual void OnTick(Instant now) = 0;  // about once a second
    // Returns whether the next turn computes much for few bytes, as a handshake does. A few such
    // turns follow the others.
    virtual bool NextTurnIsHeavy() const { return false; }

   private:
    friend class EventLoop;
    PeerNetwork network_ = {};
    bool is_watched_ = false;
    bool waits_ = false;   // for its turn
    uint32_t events_ = 0;  // of its next turn
  };

  // `thread_name`, of at most 15 bytes, is for top, gdb and perf.
  explicit EventLoop(const Clock& clock, const char* thread_name = "rapt-wire");
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
  // the round. It shares the turns of the network.
  void Add(int descriptor, uint32_t events, std::shared_ptr<Watcher> watcher,
           const PeerNetwork& network);
  void Change(int descriptor, uint32_t events);
  void Remove(int descriptor);

  // Gives the watcher a turn before the loop waits again, with these events or more.
  void RequestTurn(std::shared_ptr<Watcher> watcher, uint32_t events);

  // A scratch buffer, valid until the watcher returns.
  absl::Span<uint8_t> scratch() { return absl::MakeSpan(scratch_); }

  const Clock& clock() const { return clock_; }

 private:
  void Serve();
  void Wait();
  void RunPosted();
  void TakeTurns();
  static void TakeTurn(Watcher& watcher);
  void Tick();

  const Clock& clock_;
  const char* const thread_name_;
  const Descriptor epoll_;
  const Descriptor wake_;
  absl::flat_hash_map<int, std::shared_ptr<Watcher>> watchers_;
  std::vector<std::shared_ptr<Watcher>> removed_;  // in this round
  TurnQueue<std::shared_ptr<Watcher>> ready_, heavy_;
  std::vector<epoll_event> events_;
  std::vector<uint8_t> scratch_;
  Instant next_tick_;

  Mutex mutex_;
  std::vector<Task> posted_ ABSL_GUARDED_BY(mutex_);
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::atomic<std::thread::id> thread_id_{};
  std::thread thread_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_EVENT_LOOP_H_
