#include "client/load/recorder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

namespace rapt::load {
namespace {

using ::testing::ElementsAre;
using ::testing::Pair;

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr seconds kWarmup{1};

// A call due at 1 s + `due`, sent after `wait` and done after another `service`.
CallRecord Call(milliseconds due, milliseconds wait, milliseconds service) {
  return {
      .due = kWarmup + due, .sent = kWarmup + due + wait, .done = kWarmup + due + wait + service};
}

CallRecord Failed(milliseconds service, const absl::Status& status) {
  CallRecord call = Call(milliseconds(0), milliseconds(0), service);
  call.status = status;
  return call;
}

TEST(RecorderTest, MeasuresLatencyFromTheDueTime) {
  Recorder recorder(1, kWarmup, {});
  recorder.Record(Call(milliseconds(0), milliseconds(30), milliseconds(2)));
  const Totals totals = recorder.totals();
  EXPECT_EQ(totals.latency.max(), 32'000'000);
  EXPECT_EQ(totals.service.max(), 2'000'000);
  EXPECT_EQ(totals.late_sends, 1);
}

TEST(RecorderTest, ExcludesTheWarmup) {
  Recorder recorder(1, kWarmup, {});
  recorder.Record(Call(-milliseconds(1), milliseconds(0), milliseconds(2)));
  EXPECT_EQ(recorder.finished(), 0);
  EXPECT_EQ(recorder.TakeInterval().ok, 1);
  recorder.Record(Call(milliseconds(0), milliseconds(0), milliseconds(2)));
  EXPECT_EQ(recorder.finished(), 1);
}

TEST(RecorderTest, SeparatesFailuresByCode) {
  Recorder recorder(1, kWarmup, {});
  for (int i = 0; i < 2; ++i) {
    recorder.Record(Failed(milliseconds(1), absl::ResourceExhaustedError("full")));
  }
  recorder.Record(Failed(milliseconds(500), absl::DeadlineExceededError("late")));
  recorder.Record(Call(milliseconds(0), milliseconds(0), milliseconds(3)));

  const Totals totals = recorder.totals();
  EXPECT_EQ(totals.latency.count(), 1);
  EXPECT_EQ(totals.latency.max(), 3'000'000);
  EXPECT_EQ(totals.failed(), 3);
  EXPECT_EQ(totals.failures.at(absl::StatusCode::kResourceExhausted).count, 2);
  EXPECT_EQ(totals.failures.at(absl::StatusCode::kResourceExhausted).example, "full");
  EXPECT_EQ(totals.failures.at(absl::StatusCode::kDeadlineExceeded).latency.max(), 500'000'000);
}

TEST(RecorderTest, CountsFailuresByCauseWithoutNumbers) {
  Recorder recorder(1, kWarmup, {});
  for (const char* message : {"10.0.0.1:8001: refused", "10.0.0.22:8001: refused", "reset"}) {
    recorder.Record(Failed(milliseconds(1), absl::UnavailableError(message)));
  }
  const Failures failures = recorder.totals().failures.at(absl::StatusCode::kUnavailable);
  EXPECT_EQ(failures.example, "10.0.0.1:8001: refused");
  EXPECT_THAT(failures.causes, ElementsAre(Pair("#.#.#.#:#: refused", 2), Pair("reset", 1)));
}

TEST(RecorderTest, BoundsTheNumberOfCauses) {
  Recorder recorder(1, kWarmup, {});
  for (size_t n = 0; n < Failures::kMaxCauses + 5; ++n) {
    recorder.Record(Failed(milliseconds(1), absl::UnavailableError(std::string(n + 1, 'x'))));
  }
  const auto causes = recorder.totals().failures.at(absl::StatusCode::kUnavailable).causes;
  EXPECT_EQ(causes.size(), Failures::kMaxCauses + 1);
  EXPECT_EQ(causes.at(Failures::kOtherCauses), 5);
}

TEST(RecorderTest, CountsCallsWithinTheObjective) {
  Recorder recorder(1, kWarmup, milliseconds(10));
  recorder.Record(Call(milliseconds(0), milliseconds(0), milliseconds(10)));
  recorder.Record(Call(milliseconds(0), milliseconds(5), milliseconds(6)));
  recorder.Record(Failed(milliseconds(1), absl::InternalError("no")));
  EXPECT_EQ(recorder.totals().within_slo, 1);
  EXPECT_EQ(recorder.TakeInterval().within_slo, 1);
}

TEST(RecorderTest, SplitsServiceTimeByServerTimes) {
  Recorder recorder(1, kWarmup, {});
  CallRecord call = Call(milliseconds(0), milliseconds(0), milliseconds(10));
  call.server = ServerTimes{microseconds(1000), microseconds(4000), microseconds(6000)};
  recorder.Record(call);
  const Totals totals = recorder.totals();
  EXPECT_EQ(totals.queue.max(), 1'000'000);
  EXPECT_EQ(totals.compute.max(), 4'000'000);
  EXPECT_EQ(totals.server.max(), 6'000'000);
  EXPECT_EQ(totals.between.max(), 4'000'000);
}

TEST(RecorderTest, ReturnsAnIntervalOnce) {
  Recorder recorder(2, kWarmup, {});
  CallRecord call = Call(milliseconds(0), milliseconds(0), milliseconds(1));
  call.shape = 1;
  call.request_bytes = 10;
  call.response_bytes = 5;
  recorder.Record(call);
  EXPECT_EQ(recorder.TakeInterval().bytes, 15);
  EXPECT_EQ(recorder.TakeInterval().ok, 0);
  EXPECT_EQ(recorder.totals().shapes[0].count(), 0);
  EXPECT_EQ(recorder.totals().shapes[1].count(), 1);
}

TEST(TotalsTest, AddUpByCode) {
  Recorder one(1, kWarmup, {}), other(1, kWarmup, {});
  one.Record(Failed(milliseconds(1), absl::InternalError("first")));
  other.Record(Failed(milliseconds(1), absl::InternalError("second")));
  other.Record(Call(milliseconds(0), milliseconds(0), milliseconds(1)));
  Totals totals;
  totals.Add(one.totals());
  totals.Add(other.totals());
  EXPECT_EQ(totals.failures.at(absl::StatusCode::kInternal).count, 2);
  EXPECT_EQ(totals.failures.at(absl::StatusCode::kInternal).example, "first");
  EXPECT_THAT(totals.failures.at(absl::StatusCode::kInternal).causes,
              ElementsAre(Pair("first", 1), Pair("second", 1)));
  EXPECT_EQ(totals.finished(), 3);
}

}  // namespace
}  // namespace rapt::load
