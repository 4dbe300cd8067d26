#include "client/load/search.h"

#include <gtest/gtest.h>

namespace rapt::load {
namespace {

// A server that meets the objective up to a rate.
class UpTo {
 public:
  explicit UpTo(double limit) : limit_(limit) {}
  absl::StatusOr<Trial> operator()(double rate) const {
    return Trial{rate, rate, 1, 0, rate <= limit_};
  }

 private:
  double limit_;
};

TEST(SearchRateTest, FindsTheHighestPassingRate) {
  for (const double limit : {30.0, 250.0, 699.0, 701.0, 1000.0}) {
    const auto trials = SearchRate(1000, 0.02, UpTo(limit));
    ASSERT_TRUE(trials.ok());
    ASSERT_NE(BestOf(*trials), nullptr) << limit;
    EXPECT_LE(BestOf(*trials)->offered, limit);
    EXPECT_GE(BestOf(*trials)->offered, limit * 0.95) << limit;
    EXPECT_LE(trials->size(), 12u);
  }
}

TEST(SearchRateTest, EndsIfNoRatePasses) {
  const auto trials = SearchRate(1000, 0.02, UpTo(0));
  ASSERT_TRUE(trials.ok());
  EXPECT_EQ(BestOf(*trials), nullptr);
  EXPECT_LE(trials->size(), 12u);
}

TEST(SearchRateTest, ReturnsTheErrorOfATrial) {
  const auto trials = SearchRate(
      1000, 0.02, [](double) -> absl::StatusOr<Trial> { return absl::UnavailableError("gone"); });
  EXPECT_EQ(trials.status(), absl::UnavailableError("gone"));
}

}  // namespace
}  // namespace rapt::load
