// The patterns, against their definitions in other words.
#include "rapt/patterns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <set>
#include <string>
#include <vector>

namespace rapt::client {
namespace {

using ::testing::HasSubstr;

// Row i as "1101".
std::string Row(const Tensor& mask, int64_t i) {
  const int64_t columns = mask.shape().back();
  std::string row;
  for (int64_t j = 0; j < columns; ++j) {
    row += mask.values<bool>()[i * columns + j] ? '1' : '0';
  }
  return row;
}

TEST(PatternsTest, LongformerHasAWindowAndGlobalPositions) {
  const absl::StatusOr<Tensor> mask = LongformerMask(6, 1, {4});
  ASSERT_TRUE(mask.ok()) << mask.status();
  EXPECT_EQ(mask->shape(), (Shape{6, 6}));
  EXPECT_EQ(Row(*mask, 0), "110010");
  EXPECT_EQ(Row(*mask, 1), "111010");
  EXPECT_EQ(Row(*mask, 2), "011110");
  EXPECT_EQ(Row(*mask, 4), "111111");
  EXPECT_EQ(Row(*mask, 5), "000011");
}

TEST(PatternsTest, StridedSeesTheLastKeysAndEveryStrideThBefore) {
  const absl::StatusOr<Tensor> mask = StridedMask(8, 3);
  ASSERT_TRUE(mask.ok()) << mask.status();
  EXPECT_EQ(Row(*mask, 0), "10000000");
  EXPECT_EQ(Row(*mask, 4), "01111000");
  EXPECT_EQ(Row(*mask, 7), "01001111");
}

TEST(PatternsTest, NeighbourhoodIsAProductOfIntervalsThatStayInTheGrid) {
  const absl::StatusOr<Tensor> line = NeighbourhoodMask({5}, 3);
  ASSERT_TRUE(line.ok()) << line.status();
  EXPECT_EQ(Row(*line, 0), "11100");
  EXPECT_EQ(Row(*line, 2), "01110");
  EXPECT_EQ(Row(*line, 4), "00111");
  const absl::StatusOr<Tensor> dilated = NeighbourhoodMask({7}, 2, 3);
  ASSERT_TRUE(dilated.ok()) << dilated.status();
  EXPECT_EQ(Row(*dilated, 0), "1001000");
  EXPECT_EQ(Row(*dilated, 4), "0100100");
  EXPECT_EQ(Row(*dilated, 6), "0001001");
  const absl::StatusOr<Tensor> grid = NeighbourhoodMask({3, 4}, 2);
  ASSERT_TRUE(grid.ok()) << grid.status();
  EXPECT_EQ(grid->shape(), (Shape{12, 12}));
  EXPECT_EQ(Row(*grid, 0), "110011000000");
  EXPECT_EQ(Row(*grid, 11), "000000110011");  // rows 1 and 2, columns 2 and 3
}

TEST(PatternsTest, BigBirdHasEdgesNeighboursAndDifferentRandomBlocks) {
  const BigBird pattern{.length = 1000, .block = 50, .heads = 3, .random = 4, .seed = 7};
  const absl::StatusOr<Tensor> mask = BigBirdBlockMask(pattern);
  ASSERT_TRUE(mask.ok()) << mask.status();
  EXPECT_EQ(mask->shape(), (Shape{1, 3, 20, 20}));
  std::set<std::string> rows;
  for (int64_t n = 0; n < 60; ++n) {
    const std::string row = Row(*mask, n);
    const int64_t i = n % 20;
    const auto count = std::count(row.begin(), row.end(), '1');
    if (i == 0 || i == 19) {
      EXPECT_EQ(count, 20);
      continue;
    }
    EXPECT_EQ(row.front(), '1');
    EXPECT_EQ(row.back(), '1');
    for (int64_t j = i - 1; j <= i + 1; ++j) EXPECT_EQ(row[j], '1');
    EXPECT_EQ(count, (i == 1 || i == 18 ? 4 : 5) + 4) << n;
    rows.insert(row);
  }
  EXPECT_GT(rows.size(), 50u);
  // The same draws on every machine.
  EXPECT_EQ(Row(*mask, 5), Row(*BigBirdBlockMask(pattern), 5));
  BigBird other = pattern;
  other.seed = 8;
  EXPECT_NE(Row(*mask, 5), Row(*BigBirdBlockMask(other), 5));
  other.random = 100;  // more than are left
  EXPECT_EQ(Row(*BigBirdBlockMask(other), 5), std::string(20, '1'));
}

TEST(PatternsTest, RefuseWhatIsOutOfRange) {
  const auto expect = [](const absl::StatusOr<Tensor>& result, const char* message) {
    EXPECT_EQ(result.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(result.status().message()), HasSubstr(message));
  };
  expect(LongformerMask(0, 1, {}), "length is 0; it must be from 1 to 46340");
  expect(LongformerMask(5, -1, {}), "window is -1; it must be at least 0");
  expect(LongformerMask(5, 1, {5}), "a global position is 5; it must be from 0 to 4");
  expect(StridedMask(5, 0), "stride is 0; it must be at least 1");
  expect(BigBirdBlockMask({.length = 10, .block = 0}), "block is 0");
  expect(BigBirdBlockMask({.length = 10, .heads = 0}), "heads is 0");
  expect(BigBirdBlockMask({.length = 10, .random = -1}), "random is -1");
  expect(BigBirdBlockMask({.length = int64_t{1} << 40, .block = 1}), "the number of blocks is");
  expect(BigBirdBlockMask({.length = 100, .block = 10, .heads = 21474837}),
         "heads is 21474837; it must be from 1 to 21474836");
  expect(BigBirdBlockMask({.length = 64, .heads = int64_t{1} << 31}),
         "heads is 2147483648; it must be from 1 to 2147483647");
  expect(NeighbourhoodMask({}, 1), "shape has 0 axes; it must have 1 to 3");
  expect(NeighbourhoodMask({4, 3}, 4), "kernel is 4; it must be from 1 to 3");
  expect(NeighbourhoodMask({7}, 3, 3), "dilation is 3; it must be from 1 to 2");
  expect(NeighbourhoodMask({1 << 15, 1 << 15}, 1), "length is 1073741824");
}

}  // namespace
}  // namespace rapt::client
