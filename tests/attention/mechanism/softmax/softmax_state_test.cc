#include "attention/mechanism/softmax/softmax_state.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

constexpr uint64_t kSeed = 4242;

template <typename Real>
class SoftmaxStateTypedTest : public ::testing::Test {
 protected:
  static constexpr Real kEmpty = -std::numeric_limits<Real>::infinity();
  static constexpr Real kNotANumber = std::numeric_limits<Real>::quiet_NaN();
};
using RealTypes = ::testing::Types<float, double>;
TYPED_TEST_SUITE(SoftmaxStateTypedTest, RealTypes);

TYPED_TEST(SoftmaxStateTypedTest, SharesAreThoseOfTheSums) {
  // Sums of exponentials 1 and 3.
  const MergeWeights<TypeParam> w = WeighMerge<TypeParam>(0, std::log(TypeParam{3}));
  EXPECT_NEAR(w.a, 0.25, 1e-7);
  EXPECT_NEAR(w.b, 0.75, 1e-7);
  EXPECT_NEAR(w.lse, std::log(4.0), 1e-6);
}

TYPED_TEST(SoftmaxStateTypedTest, LargeSumsNeitherOverflowNorVanish) {
  for (const double shift : {-1e6, 1e6}) {
    const auto w = WeighMerge<TypeParam>(shift, shift);
    EXPECT_EQ(w.a, 0.5);
    EXPECT_EQ(w.b, 0.5);
    EXPECT_NEAR(w.lse, shift + std::log(2.0), 0.1);
  }
  const auto far = WeighMerge<TypeParam>(-1e30, 1e30);
  EXPECT_EQ(far.a, 0);
  EXPECT_EQ(far.b, 1);
  EXPECT_EQ(far.lse, TypeParam{1e30});
}

TYPED_TEST(SoftmaxStateTypedTest, AnEmptyPartChangesNoBit) {
  const std::vector<TypeParam> row = {TypeParam{0.1}, TypeParam{-3}, this->kNotANumber};
  std::vector<TypeParam> kept = row;
  TypeParam lse = 0.7;
  MergeInto<TypeParam>(absl::MakeSpan(kept), lse, std::vector<TypeParam>{5, 5, 5}, this->kEmpty);
  EXPECT_EQ(lse, TypeParam{0.7});
  EXPECT_EQ(kept[0], row[0]);
  EXPECT_EQ(kept[1], row[1]);

  std::vector<TypeParam> empty(3);
  TypeParam lse_of_empty = this->kEmpty;
  MergeInto<TypeParam>(absl::MakeSpan(empty), lse_of_empty, row, TypeParam{0.7});
  EXPECT_EQ(lse_of_empty, TypeParam{0.7});
  EXPECT_EQ(empty[0], row[0]);
  EXPECT_EQ(empty[1], row[1]);
  EXPECT_TRUE(std::isnan(empty[2]));
}

TYPED_TEST(SoftmaxStateTypedTest, TwoEmptyPartsStayEmpty) {
  std::vector<TypeParam> row(2);
  TypeParam lse = this->kEmpty;
  MergeInto<TypeParam>(absl::MakeSpan(row), lse, std::vector<TypeParam>(2), this->kEmpty);
  EXPECT_THAT(row, ::testing::Each(0));
  EXPECT_EQ(lse, this->kEmpty);
  const auto w = WeighMerge<TypeParam>(this->kEmpty, this->kEmpty);
  EXPECT_EQ(w.a, 0);
  EXPECT_EQ(w.b, 0);
  EXPECT_EQ(w.lse, this->kEmpty);
}

TYPED_TEST(SoftmaxStateTypedTest, NanOrInfinityInEitherLseGivesNan) {
  for (const TypeParam bad : {this->kNotANumber, std::numeric_limits<TypeParam>::infinity()}) {
    for (const auto& w : {WeighMerge<TypeParam>(bad, 1), WeighMerge<TypeParam>(1, bad)}) {
      EXPECT_TRUE(std::isnan(w.a + w.b));
      EXPECT_TRUE(std::isnan(w.lse));
    }
    std::vector<TypeParam> row = {1};
    TypeParam lse = 1;
    MergeInto<TypeParam>(absl::MakeSpan(row), lse, std::vector<TypeParam>{1}, bad);
    EXPECT_TRUE(std::isnan(row[0]));
    EXPECT_TRUE(std::isnan(lse));
  }
}

TYPED_TEST(SoftmaxStateTypedTest, OrderDoesNotMatter) {
  Rng rng(kSeed);
  for (int trial = 0; trial < 100; ++trial) {
    const TypeParam a = Uniform(rng, -20, 20);
    const TypeParam b = Uniform(rng, -20, 20);
    const auto ab = WeighMerge<TypeParam>(a, b);
    const auto ba = WeighMerge<TypeParam>(b, a);
    EXPECT_EQ(ab.a, ba.b) << a << " " << b;
    EXPECT_EQ(ab.b, ba.a) << a << " " << b;
    EXPECT_EQ(ab.lse, ba.lse) << a << " " << b;
    EXPECT_NEAR(ab.a + ab.b, 1, 1e-6) << a << " " << b;
  }
}

}  // namespace
}  // namespace rapt::test
