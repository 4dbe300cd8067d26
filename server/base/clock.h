// Where the time comes from. Injected, so that tests decide what time it is.
#ifndef RAPT_SERVER_BASE_CLOCK_H_
#define RAPT_SERVER_BASE_CLOCK_H_

#include <chrono>

namespace rapt {

// A point of monotonic time, without meaning outside this process. Instant::max() is never.
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

}  // namespace rapt

#endif  // RAPT_SERVER_BASE_CLOCK_H_
