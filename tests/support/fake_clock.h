// A clock that advances only on request.
#ifndef RAPT_TESTS_SUPPORT_FAKE_CLOCK_H_
#define RAPT_TESTS_SUPPORT_FAKE_CLOCK_H_

#include <atomic>
#include <chrono>

#include "base/clock.h"

namespace rapt::test {

// Thread-safe.
class FakeClock : public Clock {
 public:
  Instant Now() const override { return Instant(std::chrono::nanoseconds(now_ns_.load())); }
  void Advance(std::chrono::nanoseconds by) { now_ns_ += by.count(); }

 private:
  std::atomic<int64_t> now_ns_{1'000'000'000};
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_FAKE_CLOCK_H_
