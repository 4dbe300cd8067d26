#include "attention/memory_estimate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>

#include "attention/attention.h"

namespace rapt {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kMiB = int64_t{1} << 20;
const PlanOptions kOneThread = {.backend = "auto", .isa = "auto", .threads = 1};

// A common tutorial shape: batch 32, 8 heads, head size 64.
Problem Tutorial(int64_t length) {
  return {.batch = 32,
          .query_heads = 8,
          .kv_heads = 8,
          .query_length = length,
          .key_length = length,
          .head_size = 64,
          .value_head_size = 64};
}

MemoryEstimate Estimate(const Problem& problem, const PlanOptions& options = kOneThread) {
  const absl::StatusOr<MemoryEstimate> estimate = EstimateMemory(problem, options);
  EXPECT_TRUE(estimate.ok()) << estimate.status();
  return estimate.value_or(MemoryEstimate{});
}

TEST(MemoryEstimateTest, ScoresOf512Take256MiBAndGrowWithTheSquare) {
  EXPECT_EQ(Estimate(Tutorial(512)).standard_bytes, 256 * kMiB);
  EXPECT_EQ(Estimate(Tutorial(1024)).standard_bytes, 1024 * kMiB);
  EXPECT_EQ(Estimate(Tutorial(16384)).standard_bytes, 256 * 1024 * kMiB);
}

TEST(MemoryEstimateTest, ScoresAreInTheTypeOfTheSoftmax) {
  Problem problem = Tutorial(512);
  problem.dtype = DType::kFloat16;
  EXPECT_EQ(Estimate(problem).standard_bytes, 256 * kMiB);
  problem.softmax_in_fp64 = true;
  EXPECT_EQ(Estimate(problem).standard_bytes, 512 * kMiB);
  problem.softmax_in_fp64 = false;
  problem.dtype = DType::kFloat64;
  EXPECT_EQ(Estimate(problem).standard_bytes, 512 * kMiB);
}

TEST(MemoryEstimateTest, TensorsAreQueryKeyValueAndOutput) {
  EXPECT_EQ(Estimate(Tutorial(512)).tensor_bytes, 4 * 32 * 8 * 512 * 64 * 4);
  Problem problem = {.dtype = DType::kBFloat16,
                     .batch = 3,
                     .query_heads = 6,
                     .kv_heads = 2,
                     .query_length = 5,
                     .key_length = 7,
                     .past_length = 4,
                     .head_size = 10,
                     .value_head_size = 20};
  const int64_t q_and_y = 3 * 6 * 5 * (10 + 20);
  const int64_t k_and_v = 3 * 2 * (7 + 4) * (10 + 20);
  EXPECT_EQ(Estimate(problem).tensor_bytes, 2 * (q_and_y + k_and_v));
  EXPECT_EQ(Estimate(problem).standard_bytes, 4 * 3 * 6 * 5 * (7 + 4));
}

TEST(MemoryEstimateTest, AChunkHoldsItsScoresAndEachRowsState) {
  const int64_t rows = 32 * 8 * 2048;
  EXPECT_EQ(Estimate(Tutorial(2048)).chunked_bytes, rows * (kEstimateChunk + 2 + 64) * 4);
  const int64_t few_rows = 32 * 8 * 100;
  EXPECT_EQ(Estimate(Tutorial(100)).chunked_bytes, few_rows * (100 + 2 + 64) * 4)
      << "fewer keys than a chunk";
}

TEST(MemoryEstimateTest, FusedIsThePlansWorkspaceForAnyLength) {
  for (const char* backend : {"cpu", "reference"}) {
    const PlanOptions options = {.backend = backend, .isa = "auto", .threads = 3};
    const MemoryEstimate estimate = Estimate(Tutorial(1024), options);
    const absl::StatusOr<Plan> plan = MakePlan(Tutorial(1024), options);
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(estimate.fused_bytes, plan->workspace_bytes());
    EXPECT_EQ(estimate.plan, plan->Describe());
  }
  EXPECT_EQ(Estimate(Tutorial(4096)).fused_bytes, Estimate(Tutorial(1 << 20)).fused_bytes);
}

TEST(MemoryEstimateTest, NoKeysOrNoQueriesNeedNoScores) {
  Problem problem = Tutorial(512);
  problem.key_length = 0;
  EXPECT_EQ(Estimate(problem).standard_bytes, 0);
  problem = Tutorial(512);
  problem.query_length = 0;
  EXPECT_EQ(Estimate(problem).standard_bytes, 0);
  EXPECT_EQ(Estimate(problem).chunked_bytes, 0);
}

TEST(MemoryEstimateTest, RejectsInvalidProblemsAndOverflows) {
  constexpr int64_t kLongest = int64_t{1} << 40;
  const struct {
    std::function<void(Problem&, PlanOptions&)> change;
    const char* message;
  } cases[] = {
      {[](Problem& p, PlanOptions&) { p.batch = -1; }, "batch is -1"},
      {[](Problem& p, PlanOptions&) { p.head_size = 0; }, "head size of Q and K is 0"},
      {[](Problem& p, PlanOptions&) { p.kv_heads = 3; }, "must be a multiple"},
      {[](Problem& p, PlanOptions&) { p.query_length = p.key_length = kLongest; },
       "overflows 64 bits"},
      {[](Problem& p, PlanOptions&) { p.key_length = kLongest + 1; }, "to 2^40"},
      {[](Problem& p, PlanOptions& options) {
         p.batch = p.query_heads = p.kv_heads = 1;
         p.head_size = p.value_head_size = kLongest;
         options.threads = 1 << 20;
       },
       "the workspace of 1048576 threads"},
      {[](Problem&, PlanOptions& options) { options.backend = "abacus"; }, "abacus"},
  };
  for (const auto& c : cases) {
    Problem problem = Tutorial(512);
    PlanOptions options = kOneThread;
    c.change(problem, options);
    const absl::StatusOr<MemoryEstimate> estimate = EstimateMemory(problem, options);
    ASSERT_FALSE(estimate.ok()) << c.message;
    EXPECT_EQ(estimate.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(estimate.status().message()), HasSubstr(c.message));
  }
}

}  // namespace
}  // namespace rapt
