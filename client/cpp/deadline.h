// A deadline on the monotonic clock.
#ifndef RAPT_CLIENT_CPP_DEADLINE_H_
#define RAPT_CLIENT_CPP_DEADLINE_H_

#include <grpc/support/time.h>

#include <algorithm>
#include <chrono>

namespace rapt::client {

class Deadline {
 public:
  // Clamps the timeout to between 0 and a year, so that no sum overflows.
  static Deadline After(std::chrono::nanoseconds timeout) {
    using std::chrono::nanoseconds;
    return Deadline(Clock::now() +
                    std::clamp<nanoseconds>(timeout, nanoseconds(0), std::chrono::hours(24 * 365)));
  }

  std::chrono::nanoseconds left() const { return time_ - Clock::now(); }

  gpr_timespec ToGrpc() const {
    return gpr_time_add(gpr_now(GPR_CLOCK_MONOTONIC),
                        gpr_time_from_nanos(left().count(), GPR_TIMESPAN));
  }

 private:
  using Clock = std::chrono::steady_clock;
  explicit Deadline(Clock::time_point time) : time_(time) {}

  Clock::time_point time_;
};

}  // namespace rapt::client

#endif  // RAPT_CLIENT_CPP_DEADLINE_H_
