#include "base/thread_pool.h"

#include <immintrin.h>
#include <sched.h>

namespace rapt {
namespace {

constexpr int kSpins = 1000;  // 10 to 50 us: a pause takes 40 to 140 cycles

template <typename Condition>
void SpinUntil(Condition condition) {
  for (int n = 0; n < kSpins && !condition(); ++n) _mm_pause();
}

// Moves the calling thread to another CPU if it runs on `cpu` and may run elsewhere. Linux wakes a
// thread on the CPU of its waker if it takes all others for busy, as it does in virtual machines
// whose idle CPUs were given back to the host, and balances them only milliseconds later.
// Afterwards the thread may run where it might before; CPUs that the process is given later are not
// added.
void MoveOff(int cpu) {
  if (cpu < 0 || sched_getcpu() != cpu) return;
  cpu_set_t allowed;
  if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0 || CPU_COUNT(&allowed) < 2) return;
  cpu_set_t others = allowed;
  CPU_CLR(cpu, &others);
  sched_setaffinity(0, sizeof(others), &others);
  sched_setaffinity(0, sizeof(allowed), &allowed);
}

}  // namespace

ThreadPool::ThreadPool(int workers) {
  try {
    for (int worker = 1; worker < workers; ++worker) {
      threads_.emplace_back([this, worker] { WorkerLoop(worker); });
    }
  } catch (...) {
    JoinAll();
    throw;
  }
}

ThreadPool::~ThreadPool() { JoinAll(); }

void ThreadPool::JoinAll() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  job_posted_.SignalAll();
  for (std::thread& thread : threads_) thread.join();
}

void ThreadPool::Drain(Job& job, int worker) {
  for (;;) {
    const int64_t task = job.next.fetch_add(1, std::memory_order_relaxed);
    if (task >= job.tasks) return;
    job.body(task, worker);
  }
}

void ThreadPool::ParallelFor(int64_t tasks, absl::FunctionRef<void(int64_t, int)> body) {
  MutexLock caller(caller_mutex_);
  Job job{body, tasks, sched_getcpu()};
  if (threads_.empty() || tasks <= 1) {
    Drain(job, 0);
    return;
  }
  {
    MutexLock lock(mutex_);
    job_ = &job;
    ++generation_;
  }
  job_posted_.SignalAll();
  Drain(job, 0);
  SpinUntil([this] { return busy_ == 0; });
  MutexLock lock(mutex_);
  job_ = nullptr;  // Workers that have not picked it up by now find no job.
  while (busy_ > 0) job_left_.Wait(mutex_);
}

void ThreadPool::WorkerLoop(int worker) {
  uint64_t seen = 0;
  for (;;) {
    SpinUntil([this, seen] { return generation_ != seen; });
    Job* job;
    {
      MutexLock lock(mutex_);
      while (!stopping_ && generation_ == seen) job_posted_.Wait(mutex_);
      if (stopping_) return;
      seen = generation_;
      job = job_;
      if (job == nullptr) continue;  // The job ended before this worker woke up.
      ++busy_;
    }
    MoveOff(job->caller_cpu);
    Drain(*job, worker);
    {
      MutexLock lock(mutex_);
      --busy_;
    }
    job_left_.SignalAll();
  }
}

}  // namespace rapt
