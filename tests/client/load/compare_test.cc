#include "client/load/compare.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "client/load/result.h"

namespace rapt::load {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::HasSubstr;
using ::testing::Not;

// A run of ten seconds. Each second has `calls` calls of `latency`, every other one `more` calls in
// addition.
Result Steady(int calls, int more, milliseconds latency) {
  Result result{.started = "",
                .command = "",
                .address = "",
                .label = "",
                .scenario = "",
                .settings = {{"seed", "0"}, {"dtype", calls > 15 ? "bf16" : "fp32"}},
                .machine = {},
                .server = {},
                .is_open_loop = false,
                .shapes = {},
                .objective = {},
                .streams = 1};
  result.run.measured = seconds(10);
  for (int i = 0; i < 10; ++i) {
    TimedInterval interval{.begin = seconds(i), .length = seconds(1)};
    interval.calls.ok = calls + i % 2 * more;
    for (int64_t n = 0; n < interval.calls.ok; ++n) {
      interval.calls.latency.Record(std::chrono::nanoseconds(latency).count());
    }
    result.run.totals.latency.Add(interval.calls.latency);
    result.run.intervals.push_back(interval);
  }
  return result;
}

Recorded Read(const Result& result) {
  const auto recorded = ReadReport(Json(result));
  EXPECT_TRUE(recorded.ok()) << recorded.status();
  return recorded.value_or(Recorded());
}

TEST(CompareTest, ComputesTheRatiosOfTheReports) {
  const auto all =
      Compare(Read(Steady(10, 0, milliseconds(40))), Read(Steady(20, 0, milliseconds(10))));
  ASSERT_EQ(all.size(), 3u);
  EXPECT_EQ(all[0].figure, "rate");
  EXPECT_DOUBLE_EQ(all[0].before, 10);
  EXPECT_DOUBLE_EQ(all[0].after, 20);
  EXPECT_DOUBLE_EQ(all[0].ratio, 2);
  EXPECT_DOUBLE_EQ(all[0].low, 2);  // every second was the same
  EXPECT_DOUBLE_EQ(all[0].high, 2);
  EXPECT_NEAR(all[1].ratio, 0.25, 0.001);
  EXPECT_NEAR(all[2].ratio, 0.25, 0.001);
}

TEST(CompareTest, ConfidenceFollowsTheSpreadOfTheIntervals) {
  const auto all =
      Compare(Read(Steady(10, 10, milliseconds(1))), Read(Steady(10, 10, milliseconds(1))));
  EXPECT_DOUBLE_EQ(all[0].ratio, 1);
  EXPECT_LT(all[0].low, 0.9);
  EXPECT_GT(all[0].low, 0.5);
  EXPECT_GT(all[0].high, 1.1);
  EXPECT_LT(all[0].high, 2);
}

TEST(CompareTest, ListsSettingsThatDiffer) {
  const std::string table =
      Table(Read(Steady(10, 0, milliseconds(1))), Read(Steady(20, 0, milliseconds(1))));
  EXPECT_THAT(table, HasSubstr("dtype differs: fp32, bf16"));
  EXPECT_THAT(table, Not(HasSubstr("seed differs")));
}

TEST(ReadReportTest, RejectsOtherFiles) {
  for (const char* text : {"", "x", "[]", "{}", "{\"format\": \"rapt-load/2\"}"}) {
    EXPECT_EQ(ReadReport(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_THAT(ReadReport("{\"format\": \"rapt-load/1\",\n\"label\": \"a\", \"label\": \"b\"}")
                  .status()
                  .message(),
              HasSubstr("label is given twice"));
  EXPECT_THAT(ReadReport("{\n\"format\": x}").status().message(), HasSubstr("line 2, column 11"));
}

}  // namespace
}  // namespace rapt::load
