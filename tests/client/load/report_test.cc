// Charts and the progress line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/load/chart.h"
#include "client/load/live_view.h"

namespace rapt::load {
namespace {

using std::chrono::seconds;
using ::testing::AllOf;
using ::testing::DoubleEq;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::StartsWith;

TEST(RoundStepsTest, CoverTheRange) {
  EXPECT_THAT(RoundSteps(0, 9.5, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(RoundSteps(0, 10, 5), ElementsAre(0, 2, 4, 6, 8, 10));
  EXPECT_THAT(RoundSteps(0, 0.004, 2), ElementsAre(0, DoubleEq(0.002), DoubleEq(0.004)));
}

TEST(ChartTest, DrawsEveryPointWithinTheChart) {
  const std::string svg = DrawSvg({.title = "a < b",
                                   .x_label = "s",
                                   .y_label = "ms",
                                   .lines = {{"p50", {{0, 1}, {10, 4}}}, {"p99", {{0, 9}}}}});
  EXPECT_THAT(svg, HasSubstr("a &lt; b"));
  EXPECT_THAT(svg, HasSubstr("<title>p99: 9</title>"));
  // The left and the right end of the axes; 4 of 10 up.
  EXPECT_THAT(svg, HasSubstr("points='70.0,230.4 610.0,165.6 '"));
}

TEST(ChartTest, AcceptsAnEmptyChart) {
  const std::string svg =
      DrawSvg({.title = "", .x_label = "", .y_label = "", .lines = {{"p50", {}}, {"p99", {}}}});
  EXPECT_THAT(svg, AllOf(StartsWith("<svg"), HasSubstr(">no data</text>")));
}

TEST(ProgressLineTest, ShowsProgressAndRate) {
  TimedInterval interval{.begin = seconds(4), .length = seconds(1), .in_flight = 3};
  interval.calls.ok = 50;
  interval.calls.failed = 2;
  interval.calls.latency.Record(2'000'000);
  EXPECT_EQ(ProgressLine(interval, seconds(10)),
            "[==========>         ]  50%  50/s  p50 2 ms  p99 2 ms  2 failed  3 in flight");
  EXPECT_THAT(ProgressLine(interval, std::nullopt), StartsWith("5 s  50/s"));
  interval.begin = -seconds(2);
  EXPECT_THAT(ProgressLine(interval, seconds(10)), StartsWith("warming up, 2 s  50/s"));
}

}  // namespace
}  // namespace rapt::load
