#include "attention/memory_estimate.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <limits>
#include <string>

#include "attention/attention.h"
#include "attention/mechanism/linear/linear_attention.h"
#include "attention/mechanism/lsh/lsh_attention.h"

namespace rapt {
namespace {

using ::testing::ElementsAre;
using ::testing::FieldsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

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

// ---- Linear time --------------------------------------------------------------------------------

void ExpectPlanOf(const TensorOperator& op, const PlanOptions& options,
                  const OperatorEstimate& estimate) {
  const absl::StatusOr<Plan> plan = MakePlan(op, options);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(estimate.workspace_bytes, plan->workspace_bytes());
  EXPECT_EQ(estimate.plan, plan->Describe());
  EXPECT_EQ(estimate.refusal, "");
}

TEST(MemoryEstimateTest, LshIsItsPlansWorkspace) {
  for (const char* backend : {"cpu", "reference"}) {
    const PlanOptions options = {.backend = backend, .threads = 3};
    const auto estimate = EstimateMemory(Tutorial(1000), options, {.lsh_hashes = 2});
    ASSERT_TRUE(estimate.ok()) << estimate.status();
    LshAttentionCall call;
    call.num_hashes = 2;
    call.chunk_length = 64;
    call.seed = 7;
    call.inputs[Role::kQ] = call.inputs[Role::kV] = {DType::kFloat32, {32, 8, 1024, 64}};
    const auto op = MakeLshAttention(call);
    ASSERT_TRUE(op.ok()) << op.status();
    ExpectPlanOf(**op, options, estimate->lsh);
    EXPECT_EQ(estimate->lsh.state_bytes, 0);
  }
}

TEST(MemoryEstimateTest, LinearIsItsPlansWorkspaceAndAStateThatDoesNotGrow) {
  Problem problem = Tutorial(1000);
  problem.kv_heads = 2;
  problem.value_head_size = 48;
  const PlanOptions options = {.threads = 3};
  const auto estimate = EstimateMemory(problem, options, {.favor_features = 100});
  ASSERT_TRUE(estimate.ok()) << estimate.status();
  LinearAttentionCall call;
  call.q_num_heads = 8;
  call.kv_num_heads = 2;
  call.update_rule = UpdateRule::kLinear;
  call.feature_map = FeatureMap::kFavor;
  call.num_features = 100;
  call.inputs[Role::kQ] = {DType::kFloat32, {32, 1000, 8 * 64}};
  call.inputs[Role::kK] = {DType::kFloat32, {32, 1000, 2 * 64}};
  call.inputs[Role::kV] = {DType::kFloat32, {32, 1000, 2 * 48}};
  const auto op = MakeLinearAttention(call);
  ASSERT_TRUE(op.ok()) << op.status();
  ExpectPlanOf(**op, options, estimate->linear);
  EXPECT_EQ(estimate->linear.state_bytes, 32 * 2 * 100 * (48 + 1) * 4);
  for (const int64_t length : {128, 32768}) {
    problem.key_length = problem.query_length = length;
    const auto other = EstimateMemory(problem, options, {.favor_features = 100});
    ASSERT_TRUE(other.ok()) << other.status();
    EXPECT_EQ(other->linear.state_bytes, estimate->linear.state_bytes);
    EXPECT_EQ(other->linear.workspace_bytes, estimate->linear.workspace_bytes);
  }
}

TEST(MemoryEstimateTest, SaysWhyAnOperatorDoesNotTakeTheSizes) {
  Problem problem = Tutorial(1 << 26);
  problem.batch = problem.query_heads = problem.kv_heads = 1;
  const auto estimate =
      EstimateMemory(problem, kOneThread, {.lsh_hashes = 1024, .lsh_chunk_length = 1});
  ASSERT_TRUE(estimate.ok()) << estimate.status();
  EXPECT_THAT(estimate->lsh.refusal, HasSubstr("can't be drawn"));
  EXPECT_EQ(estimate->lsh.workspace_bytes, 0);
  EXPECT_EQ(estimate->linear.refusal, "");
  problem.query_length = problem.key_length = 1;
  problem.head_size = 1 << 17;
  EXPECT_THAT(Estimate(problem).linear.refusal, HasSubstr("into heads of 1 to 65536"));
}

TEST(MemoryEstimateTest, RejectsOptionsOfLinearTimeOutOfRange) {
  const struct {
    LinearTimeOptions options;
    const char* message;
  } cases[] = {
      {{.lsh_hashes = 0}, "lsh_hashes is 0; it must be from 1 to 1024"},
      {{.lsh_hashes = 1025}, "lsh_hashes is 1025; it must be from 1 to 1024"},
      {{.lsh_chunk_length = -1}, "lsh_chunk_length is -1; it must be from 1 to"},
      {{.favor_features = -1}, "favor_features is -1; it must be from 1 to"},
  };
  for (const auto& c : cases) {
    const auto estimate = EstimateMemory(Tutorial(64), kOneThread, c.options);
    EXPECT_EQ(estimate.status().code(), absl::StatusCode::kInvalidArgument) << c.message;
    EXPECT_THAT(std::string(estimate.status().message()), HasSubstr(c.message));
  }
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

// 10 queries and 20 keys.
Problem Grouped(const CompactInputs& inputs = {}, DType dtype = DType::kFloat32) {
  Problem problem = {.dtype = dtype,
                     .batch = 2,
                     .query_heads = 6,
                     .kv_heads = 3,
                     .query_length = 10,
                     .key_length = 16,
                     .past_length = 4,
                     .head_size = 8,
                     .value_head_size = 8};
  AddInputs(inputs, problem);
  return problem;
}

constexpr int64_t kPairs = 10 * 20;

TEST(InputEstimateTest, ABlockMaskSavesAgainstABoolMask) {
  EXPECT_THAT(Estimate(Grouped({.block_q = 4, .block_k = 10})).inputs,
              ElementsAre(FieldsAre("block_mask", 3 * 2, kPairs - 3 * 2)));
  EXPECT_THAT(Estimate(Grouped({.block_q = 4, .block_k = 10, .per_head = true})).inputs,
              ElementsAre(FieldsAre("block_mask", 6 * 3 * 2, 6 * (kPairs - 3 * 2))));
  constexpr int64_t kLargest = std::numeric_limits<int64_t>::max();
  EXPECT_THAT(Estimate(Grouped({.block_q = kLargest, .block_k = kLargest})).inputs,
              ElementsAre(FieldsAre("block_mask", 1, kPairs - 1)));
}

TEST(InputEstimateTest, SelectedIndicesSaveAgainstABoolMask) {
  EXPECT_THAT(Estimate(Grouped({.selected_indices = 3})).inputs,
              ElementsAre(FieldsAre("selected_indices", 240, 2 * kPairs - 240)));
  EXPECT_THAT(Estimate(Grouped({.selected_indices = 3, .per_head = true})).inputs,
              ElementsAre(FieldsAre("selected_indices", 3 * 240, 2 * 6 * kPairs - 3 * 240)))
      << "per key/value head; a mask has query heads";
  EXPECT_THAT(Estimate(Grouped({.selected_indices = 9})).inputs,
              ElementsAre(FieldsAre("selected_indices", 720, 2 * kPairs - 720)))
      << "more than the mask";
}

TEST(InputEstimateTest, ABiasByDistanceSavesAgainstABiasOfItsType) {
  EXPECT_THAT(Estimate(Grouped({.alibi = true})).inputs,
              ElementsAre(FieldsAre("alibi", 0, 6 * kPairs * 4)));
  EXPECT_THAT(Estimate(Grouped({.bias_table = 32}, DType::kFloat16)).inputs,
              ElementsAre(FieldsAre("bias_table", 32 * 6 * 2, 6 * kPairs * 2 - 32 * 6 * 2)));
  EXPECT_THAT(Estimate(Grouped({.relative_bias = 7})).inputs,
              ElementsAre(FieldsAre("relative_bias", 7 * 4, kPairs * 4 - 7 * 4)));
  EXPECT_THAT(Estimate(Grouped({.relative_bias = 7, .per_head = true}, DType::kFloat64)).inputs,
              ElementsAre(FieldsAre("relative_bias", 6 * 7 * 8, 6 * 8 * (kPairs - 7))));
}

TEST(InputEstimateTest, ABiasHasBatchRowsIfSlopesOrPositionsHaveThem) {
  Problem problem = Grouped();
  problem.alibi_slopes = AlibiSlopes{DType::kFloat32, 2};
  EXPECT_THAT(Estimate(problem).inputs,
              ElementsAre(FieldsAre("alibi_slopes", 2 * 6 * 4, 2 * 6 * 4 * (kPairs - 1))));
  problem = Grouped({.alibi = true});
  problem.past_length = 0;
  problem.key_length = 20;
  problem.has_key_lengths = true;
  problem.alignment = Alignment::kOnnx;
  EXPECT_THAT(Estimate(problem).inputs, ElementsAre(FieldsAre("alibi", 0, 2 * 6 * kPairs * 4)));
}

TEST(InputEstimateTest, ListsEveryInput) {
  EXPECT_THAT(Estimate(Grouped()).inputs, IsEmpty());
  const Problem problem =
      Grouped({.block_q = 10, .block_k = 20, .selected_indices = 1, .alibi = true});
  EXPECT_THAT(Estimate(problem).inputs,
              ElementsAre(FieldsAre("block_mask", 1, kPairs - 1),
                          FieldsAre("selected_indices", 80, 2 * kPairs - 80),
                          FieldsAre("alibi", 0, 6 * kPairs * 4)));
}

TEST(InputEstimateTest, TheWorkspaceIsThatOfThePlanWithTheInputs) {
  const Problem problem = Grouped({.selected_indices = 3, .relative_bias = 7});
  const absl::StatusOr<Plan> plan = MakePlan(problem, kOneThread);
  ASSERT_TRUE(plan.ok()) << plan.status();
  EXPECT_EQ(Estimate(problem).fused_bytes, plan->workspace_bytes());
  EXPECT_NE(Estimate(problem).fused_bytes, Estimate(Grouped()).fused_bytes);
}

TEST(InputEstimateTest, RejectsInvalidInputs) {
  constexpr int64_t kLongest = int64_t{1} << 40;
  const struct {
    CompactInputs inputs;
    const char* message;
  } cases[] = {
      {{.block_q = 64}, "block_mask is set but block_k is not"},
      {{.block_k = 64}, "block_mask is set but block_q is not"},
      {{.block_q = -1, .block_k = 64}, "block_q is -1; it must be at least 1"},
      {{.block_q = 64, .block_k = -2}, "block_k is -2; it must be at least 1"},
      {{.selected_indices = -3}, "selected_indices has a last axis of -3"},
      {{.alibi = true, .bias_table = 32}, "alibi and bias_table are both set"},
      {{.bias_table = 32, .relative_bias = 7}, "bias_table and relative_bias are both set"},
      {{.bias_table = 1}, "bias_table has 1 buckets; it must have from 2 to 2^40"},
      {{.bias_table = kLongest + 1}, "bias_table has 1099511627777 buckets"},
      {{.relative_bias = 6}, "relative_bias has 6 distances; their number must be 2c + 1, odd"},
      {{.relative_bias = -7}, "relative_bias has -7 distances"},
  };
  for (const auto& c : cases) {
    const absl::StatusOr<MemoryEstimate> estimate = EstimateMemory(Grouped(c.inputs), kOneThread);
    ASSERT_FALSE(estimate.ok()) << c.message;
    EXPECT_EQ(estimate.status().code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(estimate.status().message()), HasSubstr(c.message));
  }
}

TEST(MemoryEstimateTest, RejectsInvalidProblemsAndOverflows) {
  constexpr int64_t kLongest = int64_t{1} << 40;
  const struct {
    std::function<void(Problem&, PlanOptions&)> change;
    const char* message;
  } cases[] = {
      {[](Problem& p, PlanOptions&) { p.batch = -1; }, "batch is -1"},
      {[](Problem& p, PlanOptions&) { p.head_size = 0; }, "head size of Q and K is 0"},
      {[](Problem& p, PlanOptions&) { p.kv_heads = 3; },
       "K and V have 3; the number of query heads must be a multiple of 3"},
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
