// The time source, injected so that tests control the time.
#ifndef RAPT_BASE_CLOCK_H_
#define RAPT_BASE_CLOCK_H_

#include <chrono>
#include <cstdint>

namespace rapt {

// A point in monotonic time, meaningful only within this process. Instant::max() means never.
using Instant = std::chrono::steady_clock::time_point;

// Thread-safe.
class Clock {
 public:
  virtual ~Clock() = default;
  virtual Instant Now() const = 0;
};

class SteadyClock : public Clock {
 public:
  Instant Now() const override { return std::chrono::steady_clock::now(); }
};

// Return whole units, rounded toward zero, for logs and reports.
inline int64_t Microseconds(std::chrono::nanoseconds time) {
  return std::chrono::duration_cast<std::chrono::microseconds>(time).count();
}
inline int64_t Milliseconds(std::chrono::nanoseconds time) {
  return std::chrono::duration_cast<std::chrono::milliseconds>(time).count();
}

}  // namespace rapt

#endif  // RAPT_BASE_CLOCK_H_
