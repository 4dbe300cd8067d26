// A test of calls over a small engine, with a clock that the test advances.
#ifndef RAPT_TESTS_SUPPORT_CALL_ENVIRONMENT_H_
#define RAPT_TESTS_SUPPORT_CALL_ENVIRONMENT_H_

#include <gtest/gtest.h>

#include <chrono>
#include <cstdint>
#include <memory>

#include "base/buffer_pool.h"
#include "base/timer.h"
#include "server/admission/gate.h"
#include "server/calls/access.h"
#include "server/calls/call.h"
#include "server/calls/open_calls.h"
#include "server/calls/stream_counts.h"
#include "server/engine.h"
#include "server/execution/executor.h"
#include "tests/support/fake_clock.h"

namespace rapt::test {

class CallEnvironmentTest : public ::testing::Test {
 protected:
  CallEnvironmentTest(int64_t calls_per_caller, const CallLimits& limits)
      : open_calls_({.calls = 10, .calls_per_caller = calls_per_caller}),
        small_calls_({.calls = 10, .calls_per_caller = calls_per_caller}),
        environment_{*access_, engine_, open_calls_, small_calls_,
                     streams_, timer_,  clock_,      limits} {}

  FakeClock clock_;
  Timer timer_{clock_};
  AdmissionGate gate_{
      {.budget_bytes = 1 << 20, .max_queued = 4, .max_queue_delay = std::chrono::hours(1)},
      timer_,
      clock_};
  BufferPool pool_{1 << 19, clock_};
  Executor executor_{1, clock_};
  Engine engine_{{.threads = 1}, gate_, pool_, executor_};
  const std::unique_ptr<Access> access_ = Access::Open("", clock_).value();
  OpenCalls open_calls_, small_calls_;
  StreamCounts streams_;
  const CallEnvironment environment_;
};

}  // namespace rapt::test

#endif  // RAPT_TESTS_SUPPORT_CALL_ENVIRONMENT_H_
