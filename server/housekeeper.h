// Memory that a burst of requests leaves behind: kept for the next one, then back to the system.
#ifndef RAPT_SERVER_HOUSEKEEPER_H_
#define RAPT_SERVER_HOUSEKEEPER_H_

#include <chrono>
#include <functional>
#include <thread>

#include "absl/base/thread_annotations.h"
#include "base/buffer_pool.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace rapt {

// gRPC receives into memory from malloc, in pieces of up to some megabytes. By default those come
// from the system and go back to it each time, and touching fresh pages costs more than receiving
// into them: twice as fast like this, see docs/tuning.md. What is kept is bounded by the budget's
// receive share; the housekeeper gives it back. Before any thread: one that allocated earlier has
// an arena of its own, which later threads share and malloc_trim() does not give back.
void TuneMalloc();

// Gives it back. On a thread of its own: malloc_trim() may take long, and the timer's thread ends
// the calls whose time is over.
class Housekeeper {
 public:
  // `was_busy` tells whether there was work since it was asked last; on the housekeeper's thread.
  Housekeeper(BufferPool& pool, const Clock& clock, std::function<bool()> was_busy);
  ~Housekeeper();
  Housekeeper(const Housekeeper&) = delete;
  Housekeeper& operator=(const Housekeeper&) = delete;

 private:
  void Run();
  void Look();

  BufferPool& pool_;
  const Clock& clock_;
  const std::function<bool()> was_busy_;
  Instant last_busy_ = clock_.Now();
  Instant last_trim_ = last_busy_;

  Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_HOUSEKEEPER_H_
