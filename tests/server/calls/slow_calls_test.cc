#include "server/calls/slow_calls.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <string>

#include "attention/backend.h"
#include "tests/support/fake_clock.h"

namespace rapt {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::Not;

// Returns the log lines of a call with that report.
std::string LogOf(SlowCalls& slow_calls, const CallReport& report) {
  ::testing::internal::CaptureStderr();
  slow_calls.Note("service/Method", report);
  return ::testing::internal::GetCapturedStderr();
}

CallReport Lasting(std::chrono::nanoseconds total) {
  CallReport report;
  report.total = total;
  return report;
}

TEST(SlowCallsTest, ALineHasShapeStagesAndPlan) {
  const test::FakeClock clock;
  SlowCalls slow_calls(milliseconds(100), clock);
  const Problem problem{.dtype = DType::kBFloat16,
                        .batch = 1,
                        .query_heads = 8,
                        .kv_heads = 2,
                        .query_length = 128,
                        .key_length = 256,
                        .head_size = 64,
                        .value_head_size = 64,
                        .scale = 0.125,
                        .causal = true};
  CallReport report = Lasting(milliseconds(250));
  report.ended_in = Stage::kSend;
  report.time_of(Stage::kReceive) = microseconds(1500);
  report.time_of(Stage::kQueue) = milliseconds(200);
  report.time_of(Stage::kCompute) = milliseconds(40);
  report.time_of(Stage::kSend) = microseconds(0);
  report.received_bytes = 1000;
  report.sent_bytes = 500;
  report.problem = &problem;
  report.routing.backend = BuiltInBackends()[0];
  report.plan = "cpu/avx2 q96 k64 s1";
  EXPECT_THAT(
      LogOf(slow_calls, report),
      EndsWith("WARNING slow call method=service/Method code=OK total_us=250000 receive_us=1500 "
               "queue_us=200000 compute_us=40000 send_us=0 call=\"B=1 Hq=8 Hkv=2 Sq=128 Sk=256 P=0 "
               "D=64 Dv=64 BF16 scale=0.125 causal\" plan=\"cpu/avx2 q96 k64 s1\" "
               "received_bytes=1000 sent_bytes=500\n"));
}

TEST(SlowCallsTest, OmitsStagesThatACallDidNotReach) {
  const test::FakeClock clock;
  SlowCalls slow_calls(milliseconds(100), clock);
  CallReport report = Lasting(seconds(2));
  report.status = absl::DeadlineExceededError("while K of /some/path was received");
  report.time_of(Stage::kReceive) = seconds(2);
  EXPECT_THAT(LogOf(slow_calls, report),
              EndsWith("slow call method=service/Method code=DEADLINE_EXCEEDED total_us=2000000 "
                       "receive_us=2000000 received_bytes=0 sent_bytes=0\n"));
}

TEST(SlowCallsTest, AFastCallIsNotLogged) {
  const test::FakeClock clock;
  SlowCalls slow_calls(milliseconds(100), clock);
  EXPECT_EQ(LogOf(slow_calls, Lasting(milliseconds(99))), "");
  EXPECT_NE(LogOf(slow_calls, Lasting(milliseconds(100))), "");
}

TEST(SlowCallsTest, ALimitOfZeroLogsNothing) {
  const test::FakeClock clock;
  SlowCalls slow_calls(milliseconds(0), clock);
  EXPECT_EQ(LogOf(slow_calls, Lasting(seconds(1000))), "");
}

TEST(SlowCallsTest, CountsTheOmittedLines) {
  test::FakeClock clock;
  SlowCalls slow_calls(milliseconds(100), clock);
  for (int n = 0; n < SlowCalls::kLinesPerSecond; ++n) {
    EXPECT_THAT(LogOf(slow_calls, Lasting(seconds(1))), Not(HasSubstr("left_out")));
  }
  for (int n = 0; n < 7; ++n) EXPECT_EQ(LogOf(slow_calls, Lasting(seconds(1))), "");
  clock.Advance(seconds(1));
  EXPECT_THAT(LogOf(slow_calls, Lasting(seconds(1))), EndsWith(" left_out=7\n"));
  EXPECT_THAT(LogOf(slow_calls, Lasting(seconds(1))), Not(HasSubstr("left_out")));
}

}  // namespace
}  // namespace rapt
