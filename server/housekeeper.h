// Retains memory freed after a burst of requests for the next one, and later returns it to the
// system.
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

// Makes malloc retain freed blocks of up to some megabytes, into which gRPC receives. By default
// they are mapped and unmapped each time, and the page faults cost more than receiving: retaining
// them doubles the speed, see docs/tuning.md. The budget's receive share limits the retained
// memory, and Housekeeper returns it. REQUIRES: no thread has started: a thread that allocated
// earlier would have a separate arena, which later threads share and malloc_trim() does not trim.
void TuneMalloc();

// Returns retained memory to the system every second. Has its own thread: malloc_trim() may take
// long, which would delay deadlines on the timer's thread.
class Housekeeper {
 public:
  // `was_busy` returns whether there was work since its previous call; `expire` frees what has
  // expired. They run on this thread.
  Housekeeper(BufferPool& pool, const Clock& clock, std::function<bool()> was_busy,
              std::function<void()> expire);
  ~Housekeeper();
  Housekeeper(const Housekeeper&) = delete;
  Housekeeper& operator=(const Housekeeper&) = delete;

 private:
  void Run();
  void Check();

  BufferPool& pool_;
  const Clock& clock_;
  const std::function<bool()> was_busy_;
  const std::function<void()> expire_;
  Instant last_busy_ = clock_.Now();
  Instant last_trim_ = last_busy_;

  Mutex mutex_;
  CondVar stop_;
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::thread thread_;
};

}  // namespace rapt

#endif  // RAPT_SERVER_HOUSEKEEPER_H_
