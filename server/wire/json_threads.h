#ifndef RAPT_SERVER_WIRE_JSON_THREADS_H_
#define RAPT_SERVER_WIRE_JSON_THREADS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "server/wire/event_loop.h"

namespace rapt {

// JSON, and tensors in JSON, of at most this size are read and written at once: less than it costs
// to wake another thread, and to wait for it behind other JSON.
inline constexpr int64_t kQuickJsonBytes = 16 * 1024;

// Threads that read and write large JSON, which would delay the network. Thread-safe.
class JsonThreads {
 public:
  JsonThreads(int threads, const Clock& clock) {
    for (int i = 0; i < threads; ++i) {
      loops_.push_back(std::make_unique<EventLoop>(clock, "rapt-json"));
      loops_.back()->Start();
    }
  }

  // Runs the task on one of the threads, on each in turn.
  void Post(EventLoop::Task task) { loops_[next_++ % loops_.size()]->Post(std::move(task)); }

 private:
  std::vector<std::unique_ptr<EventLoop>> loops_;
  std::atomic<size_t> next_{0};
};

}  // namespace rapt

#endif  // RAPT_SERVER_WIRE_JSON_THREADS_H_
