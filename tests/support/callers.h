// Threads that repeat a call until they are stopped.
#ifndef RAPT_TESTS_SUPPORT_CALLERS_H_
#define RAPT_TESTS_SUPPORT_CALLERS_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <thread>
#include <utility>
#include <vector>

#include "absl/status/status.h"

namespace rapt::test {

class Callers {
 public:
  // `call` runs on `count` threads at once.
  Callers(int count, std::function<absl::Status()> call) : call_(std::move(call)), errors_(count) {
    for (absl::Status& error : errors_) {
      threads_.emplace_back([this, &error] {
        while (!stop_) {
          error.Update(call_());
          ++ended_;
          ended_.notify_all();
        }
      });
    }
  }
  ~Callers() { Stop().IgnoreError(); }
  Callers(const Callers&) = delete;
  Callers& operator=(const Callers&) = delete;

  // Blocks until `count` more calls have ended.
  void WaitForMore(int64_t count) const {
    const int64_t enough = ended_ + count;
    for (int64_t now = ended_; now < enough; now = ended_) ended_.wait(now);
  }

  // Waits for the current calls. Returns the first error of a thread that had one.
  absl::Status Stop() {
    stop_ = true;
    for (std::thread& thread : threads_) thread.join();
    threads_.clear();
    absl::Status status;
    for (const absl::Status& error : errors_) status.Update(error);
    return status;
  }

 private:
  const std::function<absl::Status()> call_;
  std::atomic<int64_t> ended_{0};
  std::atomic<bool> stop_{false};
  std::vector<absl::Status> errors_;
  std::vector<std::thread> threads_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_CALLERS_H_
