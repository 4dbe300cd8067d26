#include "server/protocols/oip/statistics.h"

#include <gtest/gtest.h>

namespace rapt::oip {
namespace {

inference::ModelStatistics Describe(const Statistics& statistics) {
  inference::ModelStatistics message;
  statistics.Describe(message);
  return message;
}

TEST(StatisticsTest, RequestsOfOneRunAreOneExecution) {
  Statistics statistics;
  CallReport report;
  report.batch_size = 3;
  for (int run = 0; run < 7; ++run) {
    for (int n = 0; n < 3; ++n) statistics.Count(report);
  }
  report.batch_size = 1;
  for (int n = 0; n < 4; ++n) statistics.Count(report);
  const inference::ModelStatistics message = Describe(statistics);
  EXPECT_EQ(message.inference_count(), 25u);
  EXPECT_EQ(message.execution_count(), 11u);
  EXPECT_EQ(message.inference_stats().success().count(), 25u);
}

TEST(StatisticsTest, AFailureIsNotAnExecution) {
  Statistics statistics;
  CallReport report;
  report.status = absl::DeadlineExceededError("late");
  statistics.Count(report);
  const inference::ModelStatistics message = Describe(statistics);
  EXPECT_EQ(message.execution_count(), 0u);
  EXPECT_EQ(message.inference_count(), 0u);
  EXPECT_EQ(message.inference_stats().fail().count(), 1u);
}

}  // namespace
}  // namespace rapt::oip
