#include "attention/attribute_value.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <limits>
#include <optional>
#include <vector>

#include "absl/strings/string_view.h"

namespace rapt {
namespace {

using std::optional;
using Text = absl::string_view;

template <typename T>
optional<T> Read(const GivenValue& given) {
  T value{};
  return ReadValue(given, value) ? optional<T>(value) : std::nullopt;
}

TEST(AttributeValueTest, WholeNumbers) {
  constexpr uint64_t kMost = std::numeric_limits<uint64_t>::max();
  EXPECT_EQ(Read<int64_t>(int64_t{-3}), -3);
  EXPECT_EQ(Read<int64_t>(uint64_t{3}), 3);
  EXPECT_EQ(Read<int64_t>(Text("-3")), -3);
  EXPECT_EQ(Read<uint64_t>(kMost), kMost);
  EXPECT_EQ(Read<uint64_t>(Text("18446744073709551615")), kMost);
  EXPECT_EQ(Read<uint64_t>(int64_t{3}), 3);
  for (const GivenValue& given :
       {GivenValue(true), GivenValue(3.0), GivenValue(kMost), GivenValue(Text("")),
        GivenValue(Text("3x")), GivenValue(Text("9223372036854775808"))}) {
    EXPECT_EQ(Read<int64_t>(given), std::nullopt) << ToString(given);
  }
  for (const GivenValue& given : {GivenValue(int64_t{-1}), GivenValue(Text("-1")),
                                  GivenValue(Text("18446744073709551616"))}) {
    EXPECT_EQ(Read<uint64_t>(given), std::nullopt) << ToString(given);
  }
}

TEST(AttributeValueTest, RealNumbers) {
  EXPECT_EQ(Read<double>(0.5), 0.5);
  EXPECT_EQ(Read<double>(int64_t{-3}), -3);
  EXPECT_EQ(Read<double>(uint64_t{3}), 3);
  EXPECT_EQ(Read<double>(Text("-2.5e-3")), -2.5e-3);
  EXPECT_EQ(Read<double>(Text("inf")), std::numeric_limits<double>::infinity());
  EXPECT_EQ(Read<double>(Text("-1e400")), -std::numeric_limits<double>::infinity());
  EXPECT_EQ(Read<double>(Text("1e-400")), 0);
  EXPECT_EQ(Read<double>(true), std::nullopt);
  EXPECT_EQ(Read<double>(Text("half")), std::nullopt);
}

TEST(AttributeValueTest, Bools) {
  for (const GivenValue& given : {GivenValue(true), GivenValue(int64_t{1}), GivenValue(uint64_t{1}),
                                  GivenValue(Text("true")), GivenValue(Text("1"))}) {
    EXPECT_EQ(Read<bool>(given), true) << ToString(given);
  }
  for (const GivenValue& given : {GivenValue(false), GivenValue(int64_t{0}),
                                  GivenValue(Text("false")), GivenValue(Text("0"))}) {
    EXPECT_EQ(Read<bool>(given), false) << ToString(given);
  }
  for (const GivenValue& given :
       {GivenValue(int64_t{2}), GivenValue(int64_t{-1}), GivenValue(1.0), GivenValue(Text("yes")),
        GivenValue(Text("")), GivenValue(Text("01"))}) {
    EXPECT_EQ(Read<bool>(given), std::nullopt) << ToString(given);
  }
}

TEST(AttributeValueTest, Types) {
  for (const DTypeInfo& info : kDTypes) {
    const optional<DType> want = info.is_float ? optional<DType>(info.dtype) : std::nullopt;
    EXPECT_EQ(Read<DType>(info.name), want);
    EXPECT_EQ(Read<DType>(int64_t{info.onnx}), want);
  }
  EXPECT_EQ(Read<DType>(Text("10")), DType::kFloat16);
  EXPECT_EQ(Read<DType>(Text("half")), std::nullopt);
  EXPECT_EQ(Read<DType>(int64_t{-1}), std::nullopt);
}

TEST(AttributeValueTest, Names) {
  const std::vector<absl::string_view> names = {"reformer", "simple"};
  uint8_t index = 0;
  EXPECT_TRUE(ReadValue(Text("simple"), names, index));
  EXPECT_EQ(index, 1);
  EXPECT_FALSE(ReadValue(Text("Simple"), names, index));
  EXPECT_FALSE(ReadValue(int64_t{1}, names, index));
  EXPECT_EQ(AllowedValues(names), "reformer or simple");
}

}  // namespace
}  // namespace rapt
