#include "base/thread_pool.h"

#include <gtest/gtest.h>

#include <atomic>
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

}  // namespace
}  // namespace rapt
