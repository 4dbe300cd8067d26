// The memory of a server under test.
#ifndef RAPT_TESTS_SUPPORT_MEMORY_WATCH_H_
#define RAPT_TESTS_SUPPORT_MEMORY_WATCH_H_

#include <sys/types.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <fstream>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"

namespace rapt::test {

// False with sanitizers, which keep shadow memory and freed memory.
#ifdef RAPT_SANITIZED
inline constexpr bool kRssIsMeaningful = false;
#else
inline constexpr bool kRssIsMeaningful = true;
#endif

// Returns the process's anonymous memory, without mapped files.
inline int64_t RssAnonBytes(pid_t pid) {
  std::ifstream status(absl::StrCat("/proc/", pid, "/status"));
  for (std::string word; status >> word;) {
    int64_t kib;
    if (word == "RssAnon:" && status >> kib) return kib * 1024;
  }
  return 0;
}

// Samples the server's memory until it is destroyed.
class MemoryWatch {
 public:
  explicit MemoryWatch(pid_t pid)
      : thread_([this, pid] {
          while (!stopping_) {
            peak_ = std::max(peak_.load(), RssAnonBytes(pid));
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
          }
        }) {}
  ~MemoryWatch() {
    stopping_ = true;
    thread_.join();
  }
  int64_t peak() const { return peak_; }

 private:
  std::atomic<bool> stopping_{false};
  std::atomic<int64_t> peak_{0};
  std::thread thread_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_MEMORY_WATCH_H_
