#include "client/load/arrivals.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

namespace rapt::load {
namespace {

using std::chrono::milliseconds;
using std::chrono::nanoseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<double> Take(Arrivals& arrivals, int count) {
  std::vector<double> times;
  for (int i = 0; i < count; ++i) {
    times.push_back(std::chrono::duration<double>(*arrivals.Next()).count());
  }
  return times;
}

// Returns the number of arrivals in [begin, end) s.
int CountIn(const std::vector<double>& times, double begin, double end) {
  int count = 0;
  for (const double time : times) count += time >= begin && time < end ? 1 : 0;
  return count;
}

TEST(ArrivalsTest, AreEvenlySpacedAndContinueBeyondTheDuration) {
  Arrivals arrivals = Arrivals::Evenly(*ParseRate("4", seconds(1)));
  EXPECT_THAT(Take(arrivals, 7), ElementsAre(0, 0.25, 0.5, 0.75, 1, 1.25, 1.5));
}

TEST(ArrivalsTest, RampEvenlyFromOneRateToAnother) {
  Arrivals arrivals = Arrivals::Evenly(*ParseRate("100..300", seconds(10)));
  const std::vector<double> times = Take(arrivals, 2600);
  EXPECT_NEAR(CountIn(times, 0, 1), 110, 1);
  EXPECT_NEAR(CountIn(times, 5, 6), 210, 1);
  EXPECT_NEAR(CountIn(times, 9, 10), 290, 1);
  EXPECT_NEAR(CountIn(times, 10, 11), 300, 1);
}

TEST(ArrivalsTest, RampDownToo) {
  Arrivals arrivals = Arrivals::Evenly(*ParseRate("300..100", seconds(10)));
  const std::vector<double> times = Take(arrivals, 2200);
  EXPECT_NEAR(CountIn(times, 0, 1), 290, 1);
  EXPECT_NEAR(CountIn(times, 9, 10), 110, 1);
}

TEST(ArrivalsTest, RiseInSteps) {
  Arrivals arrivals = Arrivals::Evenly(*ParseRate("10..30/3", seconds(3)));
  const std::vector<double> times = Take(arrivals, 90);
  EXPECT_NEAR(CountIn(times, 0, 1), 10, 1);
  EXPECT_NEAR(CountIn(times, 1, 2), 20, 1);
  EXPECT_NEAR(CountIn(times, 2, 3), 30, 1);
}

// The gaps of a Poisson process have mean and standard deviation 1/rate.
TEST(ArrivalsTest, AtRandomAreAPoissonProcess) {
  Arrivals arrivals = Arrivals::AtRandom(*ParseRate("50", seconds(1)), 7);
  const std::vector<double> times = Take(arrivals, 40'000);
  double sum = 0, squares = 0;
  for (size_t i = 1; i < times.size(); ++i) {
    const double gap = times[i] - times[i - 1];
    ASSERT_GE(gap, 0);
    sum += gap;
    squares += gap * gap;
  }
  const auto gaps = static_cast<double>(times.size() - 1);
  const double mean = sum / gaps;
  EXPECT_NEAR(mean, 0.02, 0.02 * 0.03);
  EXPECT_NEAR(std::sqrt(squares / gaps - mean * mean), 0.02, 0.02 * 0.03);
}

TEST(ArrivalsTest, AtRandomFollowARamp) {
  Arrivals arrivals = Arrivals::AtRandom(*ParseRate("1000..3000", seconds(10)), 7);
  const std::vector<double> times = Take(arrivals, 20'000);
  EXPECT_NEAR(CountIn(times, 0, 1), 1100, 150);
  EXPECT_NEAR(CountIn(times, 9, 10), 2900, 250);
}

TEST(ArrivalsTest, AreTheSameForASeed) {
  Arrivals one = Arrivals::AtRandom(*ParseRate("50", seconds(1)), 3);
  Arrivals same = Arrivals::AtRandom(*ParseRate("50", seconds(1)), 3);
  Arrivals other = Arrivals::AtRandom(*ParseRate("50", seconds(1)), 4);
  const std::vector<double> times = Take(one, 10);
  EXPECT_EQ(times, Take(same, 10));
  EXPECT_NE(times, Take(other, 10));
}

TEST(ArrivalsTest, ReplayATraceAndEnd) {
  Arrivals arrivals = Arrivals::Replay({milliseconds(5), milliseconds(5), milliseconds(9)});
  EXPECT_EQ(arrivals.Next(), milliseconds(5));
  EXPECT_EQ(arrivals.Next(), milliseconds(5));
  EXPECT_EQ(arrivals.Next(), milliseconds(9));
  EXPECT_EQ(arrivals.Next(), std::nullopt);
}

TEST(ParseRateTest, RejectsInvalidRates) {
  for (const char* text :
       {"", "0", "-1", "nan", "x", "1..", "1..2..3", "1..2/1", "1..2/x", "1e9"}) {
    const auto rate = ParseRate(text, seconds(1));
    EXPECT_EQ(rate.status().code(), absl::StatusCode::kInvalidArgument) << text;
    EXPECT_THAT(std::string(rate.status().message()), HasSubstr("--rate")) << text;
  }
}

TEST(ParseTraceTest, ReadsTimesAndShapes) {
  const auto trace =
      ParseTrace("# a comment\n0.5 1x1x2x4\n0.25 1x1x1x4 causal # first\n\n1 1x1x2x4\n");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_THAT(trace->times, ElementsAre(milliseconds(250), milliseconds(500), seconds(1)));
  EXPECT_THAT(trace->shapes, ElementsAre("1x1x2x4", "1x1x1x4 causal"));
  EXPECT_THAT(trace->shape_of, ElementsAre(1, 0, 0));
}

TEST(ParseTraceTest, AcceptsTracesWithoutShapes) {
  const auto trace = ParseTrace("0\n0.1\n");
  ASSERT_TRUE(trace.ok()) << trace.status();
  EXPECT_THAT(trace->times, ElementsAre(nanoseconds(0), milliseconds(100)));
  EXPECT_TRUE(trace->shape_of.empty());
}

TEST(ParseTraceTest, RejectsInvalidLines) {
  for (const char* text : {"", "# nothing\n", "x", "-1", "1\n0 1x1x1x1"}) {
    EXPECT_EQ(ParseTrace(text).status().code(), absl::StatusCode::kInvalidArgument) << text;
  }
  EXPECT_THAT(std::string(ParseTrace("1\nnow\n").status().message()), HasSubstr("line 2"));
}

}  // namespace
}  // namespace rapt::load
