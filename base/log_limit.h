#ifndef RAPT_BASE_LOG_LIMIT_H_
#define RAPT_BASE_LOG_LIMIT_H_

#include <chrono>
#include <cstdint>
#include <optional>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace rapt {

// Limits how often a kind of log line is written. Thread-safe. REQUIRES: the clock outlives this.
class LogLimit {
 public:
  LogLimit(int lines_per_second, const Clock& clock)
      : lines_per_second_(lines_per_second), clock_(clock) {}

  // Returns how many lines were left out since the last one, or nullopt to leave out this one, too.
  std::optional<int64_t> Take() {
    const Instant now = clock_.Now();
    MutexLock lock(mutex_);
    if (now - second_began_ >= std::chrono::seconds(1)) {
      second_began_ = now;
      lines_ = 0;
    }
    if (lines_ == lines_per_second_) {
      ++left_out_;
      return std::nullopt;
    }
    ++lines_;
    return std::exchange(left_out_, 0);
  }

 private:
  const int lines_per_second_;
  const Clock& clock_;
  Mutex mutex_;
  Instant second_began_ ABSL_GUARDED_BY(mutex_);
  int lines_ ABSL_GUARDED_BY(mutex_) = 0;  // of this second
  int64_t left_out_ ABSL_GUARDED_BY(mutex_) = 0;
};

}  // namespace rapt

#endif  // RAPT_BASE_LOG_LIMIT_H_
