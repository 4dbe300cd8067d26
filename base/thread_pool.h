// A fixed set of workers that run the tasks of one job at a time.
#ifndef RAPT_BASE_THREAD_POOL_H_
#define RAPT_BASE_THREAD_POOL_H_

#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "base/mutex.h"

namespace rapt {

// Thread-safe; jobs from several threads run one after another. The calling thread is worker 0, so
// a pool of one starts no thread. A thread that waits for a job or for its end spins for some
// microseconds before it sleeps, because jobs often follow each other closely and a small one costs
// less than waking a thread. A worker does not stay on the CPU of the caller.
class ThreadPool {
 public:
  // Throws std::system_error if a thread cannot be started.
  explicit ThreadPool(int workers);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int workers() const { return static_cast<int>(threads_.size()) + 1; }

  // Calls body(task, worker) for every task in [0, tasks), handed out in order; blocks until all
  // are done. Concurrent calls have different workers.
  void ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t task, int worker)> body);

 private:
  struct Job {
    absl::FunctionRef<void(int64_t, int)> body;
    int64_t tasks;
    int caller_cpu;  // -1: unknown
    std::atomic<int64_t> next{0};
  };

  void JoinAll();
  void WorkerLoop(int worker);
  static void Drain(Job& job, int worker);

  Mutex caller_mutex_;  // held by the caller whose job runs
  Mutex mutex_;
  CondVar job_posted_;
  CondVar job_left_;
  Job* job_ ABSL_GUARDED_BY(mutex_) = nullptr;
  // Written under mutex_, so that no sleeping worker misses a change; read without it by spinning
  // ones.
  std::atomic<uint64_t> generation_{0};
  std::atomic<int> busy_{0};
  bool stopping_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::thread> threads_;
};

}  // namespace rapt

#endif  // RAPT_BASE_THREAD_POOL_H_
