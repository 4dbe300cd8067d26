#include "attention/positions/positional_encoding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "tests/support/run_operator.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

PositionalEncodingCall CallOf(DType dtype, const Shape& shape) {
  PositionalEncodingCall call;
  call.inputs[kTokens] = TensorSpec{dtype, shape};
  return call;
}

Tensor Encode(const TensorOperator& op, const Tensor& x, const Tensor* table = nullptr) {
  Tensor y(x.dtype(), x.dims());
  Arguments arguments;
  arguments.inputs[kTokens] = x.View();
  if (table != nullptr) arguments.inputs[kTokenTable] = table->View();
  arguments.outputs[Role::kY] = y.MutableView();
  RunOperator(op, arguments);
  return y;
}

std::string ErrorOf(const PositionalEncodingCall& call) {
  return std::string(MakePositionalEncoding(call).status().message());
}

TEST(PositionalEncodingTest, AddsSinesAndCosinesInEveryType) {
  Rng rng(1);
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    for (const Dims& dims : {Dims{2, 3, 5, 7}, Dims{1, 1, 700, 130}, Dims{300, 1, 2, 512}}) {
      PositionalEncodingCall call = CallOf(dtype, {dims[0], dims[1], dims[2], dims[3]});
      call.base = dims[3] == 7 ? std::optional(50.0) : std::nullopt;
      const double base = call.base.value_or(10000);
      const auto op = MakePositionalEncoding(call).value();
      EXPECT_EQ(op->outputs()[Role::kY]->shape, call.inputs[kTokens]->shape);
      const Tensor x = Tensor(dtype, dims).FillUniform(rng, -1, 1);
      std::vector<double> want;
      for (const double value : x.ToVector()) {
        const auto n = static_cast<int64_t>(want.size());
        const int64_t e = n % dims[3];
        const auto position = static_cast<double>(n / dims[3] % dims[2]);
        const double angle = position / std::pow(base, 2.0 * static_cast<double>(e / 2) /
                                                           static_cast<double>(dims[3]));
        want.push_back(value + (e % 2 == 0 ? std::sin(angle) : std::cos(angle)));
      }
      EXPECT_TRUE(AllClose("Y", Encode(*op, x), want, {ToleranceOf(dtype), {}}));
    }
  }
}

TEST(PositionalEncodingTest, AddsTheRowsOfATable) {
  PositionalEncodingCall call = CallOf(DType::kFloat16, {2, 3, 4});
  call.inputs[kTokenTable] = TensorSpec{DType::kFloat32, {9, 4}};
  const auto op = MakePositionalEncoding(call).value();
  Rng rng(2);
  const Tensor x = Tensor(DType::kFloat16, {1, 2, 3, 4}).FillUniform(rng, -1, 1);
  const Tensor table = Tensor(DType::kFloat32, {1, 1, 9, 4}).FillUniform(rng, -1, 1);
  std::vector<double> want;
  for (const double value : x.ToVector()) {
    const auto n = static_cast<int64_t>(want.size());
    want.push_back(value + table.At(0, 0, n / 4 % 3, n % 4));
  }
  EXPECT_TRUE(AllClose("Y", Encode(*op, x, &table), want, {ToleranceOf(DType::kFloat16), {}}));
}

TEST(PositionalEncodingTest, HasNoTasksWithoutElements) {
  for (const Shape& shape : {Shape{0, 3, 4}, Shape{2, 0, 4}, Shape{2, 3, 0},
                             Shape{int64_t{1} << 40, int64_t{1} << 40, 0, 4}}) {
    const auto op = MakePositionalEncoding(CallOf(DType::kFloat32, shape)).value();
    EXPECT_EQ(MakePlan(*op, {}).value().stages[0], 0);
  }
}

TEST(PositionalEncodingTest, NamesWhatIsInvalid) {
  EXPECT_EQ(ErrorOf({}), "X is missing");
  EXPECT_THAT(ErrorOf(CallOf(DType::kInt64, {2, 3})), HasSubstr("X has type INT64"));
  EXPECT_THAT(ErrorOf(CallOf(DType::kFloat32, {3})), HasSubstr("[..., S, E], of rank 2 to 8"));
  EXPECT_THAT(ErrorOf(CallOf(DType::kFloat32, {-1, 3})), HasSubstr("no axis may be negative"));
  for (const double base : {0.0, -3.0, std::numeric_limits<double>::infinity(),
                            std::numeric_limits<double>::quiet_NaN()}) {
    PositionalEncodingCall call = CallOf(DType::kFloat32, {2, 3});
    call.base = base;
    EXPECT_THAT(ErrorOf(call), HasSubstr("it must be positive and finite"));
  }
  PositionalEncodingCall call = CallOf(DType::kFloat32, {2, 3, 4});
  for (const Shape& shape : {Shape{2, 4}, Shape{3, 5}, Shape{12}}) {
    call.inputs[kTokenTable] = TensorSpec{DType::kFloat32, shape};
    EXPECT_THAT(ErrorOf(call), HasSubstr("it must be [M, 4] with at least 3 rows"));
  }
  call.inputs[kTokenTable] = TensorSpec{DType::kFloat16, {3, 4}};
  EXPECT_THAT(ErrorOf(call), HasSubstr("table has type FP16; it must be FP32"));
  call.base = 3;
  EXPECT_THAT(ErrorOf(call), HasSubstr("table and base are both set"));
}

}  // namespace
}  // namespace rapt::test
