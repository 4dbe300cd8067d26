// Gradients on the command line, computed by a caller whose derivatives are known.
#include "client/cli/gradients.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <utility>

namespace rapt {
namespace {

using ::testing::DoubleNear;
using ::testing::ElementsAre;
using ::testing::Field;

constexpr double kInfinity = std::numeric_limits<double>::infinity();

client::Tensor TensorOf(const client::Shape& shape, const std::vector<double>& values) {
  return {
      client::DType::kFloat64, shape,
      std::string(reinterpret_cast<const char*>(values.data()), values.size() * sizeof(double))};
}

std::vector<double> ValuesOf(const client::TensorView& view) {
  const auto* values = reinterpret_cast<const double*>(view.data.data());
  return {values, values + view.data.size() / sizeof(double)};
}

// Y = Q^2 + 3 V, and lse = (-inf, the sum of K). The gradients of Q are multiplied by `factor`.
class FakeCaller : public AttentionCaller {
 public:
  explicit FakeCaller(double factor = 1) : factor_(factor) {}

  absl::StatusOr<client::AttendResult> Attend(const client::AttendCall& call) override {
    std::vector<double> y;
    const std::vector<double> q = ValuesOf(call.q), k = ValuesOf(call.k), v = ValuesOf(call.v);
    for (size_t n = 0; n < q.size(); ++n) y.push_back(q[n] * q[n] + 3 * v[n]);
    client::AttendResult result;
    result.y = TensorOf(call.q.shape, y);
    if (call.wants_lse) result.lse = TensorOf({2}, {-kInfinity, k[0] + k[1]});
    return result;
  }

  absl::StatusOr<client::BackwardResult> AttendBackward(const client::BackwardCall& call) override {
    if (call.gradients.empty()) return absl::UnimplementedError("it names no gradients");
    const std::vector<double> q = ValuesOf(call.call.q), dy = ValuesOf(call.dy);
    const double dlse = call.dlse ? ValuesOf(*call.dlse)[1] : 0;
    std::vector<double> dq, dv;
    for (size_t n = 0; n < q.size(); ++n) {
      dq.push_back(factor_ * 2 * q[n] * dy[n]);
      dv.push_back(3 * dy[n]);
    }
    client::BackwardResult result;
    result.dq = TensorOf(call.call.q.shape, dq);
    result.dk = TensorOf(call.call.k.shape, {dlse, dlse});
    result.dv = TensorOf(call.call.v.shape, dv);
    return result;
  }

  absl::StatusOr<client::Diagnosis> Diagnose(const client::AttendCall&) override {
    return absl::UnimplementedError("it diagnoses nothing");
  }
  absl::StatusOr<client::Diagnosis> Diagnose(const client::BackwardCall&) override {
    return absl::UnimplementedError("it diagnoses nothing");
  }

 private:
  const double factor_;
};

class GradientCheckTest : public testing::Test {
 protected:
  client::BackwardCall call_ = {.call = {.q = client::View<double>({1, 2}, q_),
                                         .k = client::View<double>({1, 2}, k_),
                                         .v = client::View<double>({1, 2}, v_)},
                                .dy = client::View<double>({1, 2}, dy_),
                                .dlse = client::View<double>({2}, dlse_),
                                .gradients = {"dq", "dk", "dv"}};
  std::mt19937_64 random_{1};

 private:
  static constexpr double q_[] = {1, -2}, k_[] = {3, 4}, v_[] = {5, 6};
  static constexpr double dy_[] = {0.5, 2}, dlse_[] = {7, -1};
};

testing::Matcher<GradientCheck> Passes(const std::string& name) {
  return testing::AllOf(Field(&GradientCheck::name, name), Field(&GradientCheck::passed, true));
}
testing::Matcher<GradientCheck> Fails(const std::string& name) {
  return testing::AllOf(Field(&GradientCheck::name, name), Field(&GradientCheck::passed, false));
}

TEST_F(GradientCheckTest, AcceptsTheSlopesOfTheForwardPass) {
  FakeCaller caller;
  EXPECT_THAT(CheckDirections(caller, call_, random_).value(),
              ElementsAre(Passes("dq"), Passes("dk"), Passes("dv"), Passes("all")));
  EXPECT_THAT(CheckElements(caller, call_).value(),
              ElementsAre(Passes("dq"), Passes("dk"), Passes("dv")));
}

TEST_F(GradientCheckTest, NamesTheGradientThatIsWrong) {
  for (const double factor : {1.00001, std::nan("")}) {
    FakeCaller caller(factor);
    EXPECT_THAT(CheckDirections(caller, call_, random_).value(),
                ElementsAre(Fails("dq"), Passes("dk"), Passes("dv"), Fails("all")));
  }
}

TEST_F(GradientCheckTest, ReportsTheElementThatDiffersMost) {
  FakeCaller caller(1.5);
  const std::vector<GradientCheck> checks = CheckElements(caller, call_).value();
  ASSERT_THAT(checks, ElementsAre(Fails("dq"), Passes("dk"), Passes("dv")));
  EXPECT_EQ(checks[0].element, 1);
  EXPECT_THAT(checks[0].slope, DoubleNear(-8, 1e-6));  // 2 q dy
  EXPECT_THAT(checks[0].gradient, DoubleNear(-12, 1e-12));
  EXPECT_THAT(checks[0].difference, DoubleNear(4, 1e-6));
}

TEST_F(GradientCheckTest, WithoutDlseTheLseDoesNotCount) {
  call_.dlse.reset();
  FakeCaller caller;
  const std::vector<GradientCheck> checks = CheckElements(caller, call_).value();
  ASSERT_THAT(checks, ElementsAre(Passes("dq"), Passes("dk"), Passes("dv")));
  EXPECT_EQ(checks[1].slope, 0);
}

TEST_F(GradientCheckTest, ReturnsTheErrorOfACall) {
  call_.gradients.clear();
  FakeCaller caller;
  EXPECT_EQ(CheckElements(caller, call_).status().message(), "it names no gradients");
  EXPECT_EQ(CheckDirections(caller, call_, random_).status().message(), "it names no gradients");
}

TEST(GradientsTest, HaveNorms) {
  EXPECT_EQ(NormOf(TensorOf({2, 1}, {3, -4})), 5);
  EXPECT_EQ(NormOf(client::Tensor(client::DType::kBFloat16, {1}, std::string("\x80\xbf", 2))), 1);
  EXPECT_EQ(NormOf(TensorOf({0}, {})), 0);
}

}  // namespace
}  // namespace rapt
