#include "base/thread_pool.h"

#include <gtest/gtest.h>
#include <sched.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

namespace rapt {
namespace {

TEST(ThreadPoolTest, RunsEveryTaskOnceOnAFreeWorker) {
  for (const int workers : {1, 2, 5}) {
    ThreadPool pool(workers);
    EXPECT_EQ(pool.workers(), workers);
    std::vector<std::atomic<int>> runs(1000);
    std::vector<std::atomic<int>> users(workers);
    pool.ParallelFor(1000, [&](int64_t task, int worker) {
      EXPECT_EQ(users.at(worker)++, 0) << "worker " << worker << " of " << workers;
      ++runs.at(task);
      --users[worker];
    });
    for (const std::atomic<int>& count : runs) EXPECT_EQ(count, 1);
  }
}

TEST(ThreadPoolTest, DoesNothingWithoutTasks) {
  ThreadPool pool(3);
  pool.ParallelFor(0, [](int64_t, int) { FAIL(); });
}

TEST(ThreadPoolTest, RunsJobsFromSeveralThreads) {
  ThreadPool pool(3);
  std::atomic<int> runs{0};
  std::vector<std::thread> callers;
  for (int i = 0; i < 4; ++i) {
    callers.emplace_back([&] {
      for (int job = 0; job < 100; ++job) pool.ParallelFor(7, [&](int64_t, int) { ++runs; });
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(runs, 4 * 100 * 7);
}

cpu_set_t AllowedCpus() {
  cpu_set_t allowed;
  EXPECT_EQ(sched_getaffinity(0, sizeof(allowed), &allowed), 0);
  return allowed;
}

TEST(ThreadPoolTest, WorkersLeaveTheCpuOfTheCallerAndMayReturn) {
  const cpu_set_t allowed = AllowedCpus();
  if (CPU_COUNT(&allowed) < 2) GTEST_SKIP() << "needs two CPUs";
  ThreadPool pool(2);
  std::atomic<int> jobs{0}, on_cpu_of_caller{0}, restricted{0};
  std::thread caller([&] {
    cpu_set_t own;
    CPU_ZERO(&own);
    CPU_SET(sched_getcpu(), &own);
    ASSERT_EQ(sched_setaffinity(0, sizeof(own), &own), 0);
    const int cpu_of_caller = sched_getcpu();
    for (int job = 0; job < 100; ++job) {
      std::this_thread::sleep_for(std::chrono::milliseconds(2));  // The worker falls asleep.
      std::atomic<bool> seen{false};
      pool.ParallelFor(2, [&](int64_t, int worker) {
        if (worker == 0) {
          while (!seen) sched_yield();  // so that the other task is the worker's
          return;
        }
        if (seen) return;  // The worker took both tasks.
        const cpu_set_t now = AllowedCpus();
        ++jobs;
        if (sched_getcpu() == cpu_of_caller) ++on_cpu_of_caller;
        if (!CPU_EQUAL(&now, &allowed)) ++restricted;
        seen = true;
      });
    }
  });
  caller.join();
  EXPECT_EQ(jobs, 100);
  EXPECT_LT(on_cpu_of_caller, 20);  // The system may move it back.
  EXPECT_EQ(restricted, 0);
}

}  // namespace
}  // namespace rapt
