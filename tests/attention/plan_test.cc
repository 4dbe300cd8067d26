#include "attention/plan.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <set>
#include <string>
#include <vector>

#include "attention/attention.h"
#include "attention/backend.h"
#include "attention/cudnn/cudnn_backend.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;
using ::testing::StartsWith;

Problem Small() {
  return {.batch = 2,
          .query_heads = 8,
          .kv_heads = 4,
          .query_length = 100,
          .key_length = 300,
          .head_size = 64,
          .value_head_size = 48};
}

TEST(BackendSetTest, ListsDevicesFirstAndTheReferenceLast) {
  const cudnn::CudnnBackend device;
  const BackendSet backends({&device});
  ASSERT_EQ(backends.size(), BuiltInBackends().size() + 1);
  EXPECT_EQ(backends[0], &device);
  std::set<std::string> names;
  for (const Backend* backend : backends) {
    EXPECT_TRUE(names.insert(std::string(backend->name())).second) << backend->name();
    EXPECT_NE(backend->name(), "auto");
  }
  EXPECT_EQ(backends[backends.size() - 1]->name(), "reference");
}

TEST(BackendSetTest, TheReferenceSupportsEverything) {
  Problem problem = Small();
  problem.dtype = DType::kFloat64;
  problem.causal = true;
  problem.left_window = 3;
  problem.softcap = 2;
  problem.past_length = 4;
  problem.has_key_lengths = true;
  problem.mask = MaskShape{DType::kFloat16, {1, 1, 1, 5}};
  problem.dropout = Dropout{0.5, 1};
  problem.score_output = ScoreOutput::kBiased;
  problem.wants_lse = problem.wants_present = true;
  EXPECT_TRUE(BuiltInBackends()[BuiltInBackends().size() - 1]->Supports(problem).ok());
}

TEST(MakePlanTest, PresentOutputsOfALongHeadTakeManyTasks) {
  Problem problem = Small();
  problem.key_length = 1 << 20;
  const int64_t bytes = problem.batch * problem.kv_heads * problem.key_length *
                        (problem.head_size + problem.value_head_size) * SizeOf(problem.dtype);
  for (const char* backend : {"cpu", "reference"}) {
    int64_t tasks[2];
    double task_flops[2];
    for (const bool wants_present : {false, true}) {
      problem.wants_present = wants_present;
      const auto plan = MakePlan(problem, {.backend = backend});
      ASSERT_TRUE(plan.ok()) << plan.status();
      tasks[wants_present] = std::accumulate(plan->stages.begin(), plan->stages.end(), int64_t{0});
      task_flops[wants_present] = plan->task_flops();
    }
    EXPECT_GE(tasks[true] - tasks[false], bytes >> 20) << backend;
    EXPECT_EQ(task_flops[true], task_flops[false]) << backend;
  }
}

TEST(MakePlanTest, AnUnknownBackendIsInvalidAndTheErrorListsTheKnownOnes) {
  const absl::Status status = MakePlan(Small(), {.backend = "gpu"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("gpu"));
  for (const Backend* backend : BuiltInBackends()) {
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(backend->name())));
  }
  EXPECT_EQ(Validate(PlanOptions{.backend = "gpu"}), status);
}

TEST(MakePlanTest, AnUnknownInstructionSetIsInvalidAndTheErrorListsTheKnownOnes) {
  const absl::Status status = MakePlan(Small(), {.backend = "cpu", .isa = "sse9"}).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("sse9"));
  EXPECT_THAT(std::string(status.message()), HasSubstr("portable"));
  EXPECT_EQ(Validate(PlanOptions{.backend = "cpu", .isa = "sse9"}), status);
}

TEST(MakePlanTest, AnUnavailableTargetIsAFailedPrecondition) {
  const cudnn::CudnnBackend without_device;
  const BackendSet backends({&without_device});
  for (const Backend* backend : backends) {
    const std::string name(backend->name());
    if (!backend->Available().ok()) {
      EXPECT_EQ(MakePlan(Small(), {.backend = name, .backends = &backends}).status().code(),
                absl::StatusCode::kFailedPrecondition);
      continue;
    }
    for (const InstructionSet& set : backend->instruction_sets()) {
      const PlanOptions options{.backend = name, .isa = std::string(set.name)};
      const absl::Status status = MakePlan(Small(), options).status();
      EXPECT_EQ(status.code(),
                set.available ? absl::StatusCode::kOk : absl::StatusCode::kFailedPrecondition)
          << status;
      EXPECT_EQ(Validate(options), status);
    }
  }
}

TEST(MakePlanTest, AnInvalidProblemIsRejectedForEveryBackend) {
  Problem problem = Small();
  problem.kv_heads = 3;
  for (const Target& target : Targets()) {
    EXPECT_EQ(MakePlan(problem, target.Options()).status().code(),
              absl::StatusCode::kInvalidArgument);
  }
}

TEST(MakePlanTest, ThreadsAreAtLeastOne) {
  for (const int threads : {0, -1}) {
    const absl::Status status = MakePlan(Small(), {.threads = threads}).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr(std::to_string(threads)));
  }
}

TEST(MakePlanTest, AutoTakesTheFirstAvailableBackendThatSupportsTheProblem) {
  const absl::StatusOr<Plan> plan = MakePlan(Small(), {});
  ASSERT_TRUE(plan.ok()) << plan.status();
  for (const Backend* backend : BuiltInBackends()) {
    if (!backend->Available().ok() || !backend->Supports(Small()).ok()) continue;
    EXPECT_EQ(plan->routing.backend, backend);
    break;
  }
}

TEST(MakePlanTest, AutoTakesTheBestInstructionSetOfTheMachine) {
  for (const Backend* backend : BuiltInBackends()) {
    const std::string name(backend->name());
    if (!backend->Available().ok()) continue;
    std::string best;
    for (const InstructionSet& set : backend->instruction_sets()) {
      if (best.empty() && set.available) best = std::string(set.name);
    }
    const absl::StatusOr<Plan> plan = MakePlan(Small(), {.backend = name});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->isa, best);
  }
}

TEST(MakePlanTest, TheForcedTargetIsTheOneThatRuns) {
  for (const Target& target : Targets()) {
    const absl::StatusOr<Plan> plan = MakePlan(Small(), target.Options());
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_EQ(plan->routing.backend->name(), target.backend);
    EXPECT_THAT(plan->Describe(), StartsWith(target.Name()));
  }
}

// The same problem and options: the same plan, to the byte.
TEST(MakePlanTest, IsAFunctionOfProblemAndOptions) {
  for (const Target& target : Targets()) {
    for (const int threads : {1, 2, 5, 64}) {
      const PlanOptions options = target.Options(threads);
      const absl::StatusOr<Plan> a = MakePlan(Small(), options);
      const absl::StatusOr<Plan> b = MakePlan(Small(), options);
      ASSERT_TRUE(a.ok() && b.ok());
      EXPECT_EQ(a->Describe(), b->Describe());
      EXPECT_EQ(a->isa, b->isa);
      EXPECT_EQ(a->threads, threads);
      EXPECT_EQ(a->stages, b->stages);
      EXPECT_EQ(a->workspace_bytes(), b->workspace_bytes());
      EXPECT_EQ(a->flops, b->flops);
    }
  }
}

TEST(MakePlanTest, StagesAndWorkspaceAreSane) {
  for (const Target& target : Targets()) {
    const absl::StatusOr<Plan> plan = MakePlan(Small(), target.Options(3));
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_FALSE(plan->stages.empty());
    for (const int64_t tasks : plan->stages) EXPECT_GT(tasks, 0);
    EXPECT_GE(plan->shared_workspace_bytes, 0);
    EXPECT_GE(plan->worker_workspace_bytes, 0);
    EXPECT_EQ(plan->workspace_bytes(),
              plan->shared_workspace_bytes + 3 * plan->worker_workspace_bytes);
    EXPECT_GT(plan->flops, 0);
  }
}

// Fused kernels never store the score matrix, here 2^16 x 2^16.
TEST(MakePlanTest, WorkspaceDoesNotGrowWithTheScores) {
  Problem problem = Small();
  problem.query_length = problem.key_length = 1 << 16;
  for (const Target& target : Targets()) {
    const absl::StatusOr<Plan> plan = MakePlan(problem, target.Options(2));
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_LT(plan->workspace_bytes(), int64_t{1} << 30) << plan->Describe();
  }
}

TEST(MakePlanTest, NothingToComputeHasNoStages) {
  Problem problem = Small();
  problem.batch = 0;
  for (const Target& target : Targets()) {
    const absl::StatusOr<Plan> plan = MakePlan(problem, target.Options());
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_TRUE(plan->stages.empty()) << plan->Describe();
    EXPECT_EQ(plan->flops, 0);
  }
}

// 2 B Hq Sq T (D + Dv), and about half of that if causality hides half of the keys.
TEST(MakePlanTest, FlopsCountVisibleKeysOnly) {
  Problem problem = Small();
  problem.query_length = problem.key_length = 256;
  const absl::StatusOr<Plan> all = MakePlan(problem, {});
  ASSERT_TRUE(all.ok()) << all.status();
  EXPECT_DOUBLE_EQ(all->flops, 2.0 * 2 * 8 * 256 * 256 * (64 + 48));
  problem.causal = true;
  const absl::StatusOr<Plan> causal = MakePlan(problem, {});
  ASSERT_TRUE(causal.ok()) << causal.status();
  EXPECT_NEAR(causal->flops / all->flops, 0.5, 0.01);
}

// With these alignments, the diagonal of causal decoding is at the last valid key, so the query
// sees all valid keys.
TEST(MakePlanTest, CountsTheKeysOfDecodingWithLengths) {
  Problem problem{.batch = 1,
                  .query_heads = 32,
                  .kv_heads = 8,
                  .query_length = 1,
                  .key_length = 4096,
                  .head_size = 64,
                  .value_head_size = 64,
                  .causal = true};
  problem.has_key_lengths = true;
  for (const Alignment alignment : {Alignment::kBottomRight, Alignment::kOnnx}) {
    problem.alignment = alignment;
    const absl::StatusOr<Plan> plan = MakePlan(problem, {.backend = "cpu"});
    ASSERT_TRUE(plan.ok()) << plan.status();
    EXPECT_DOUBLE_EQ(plan->flops, 2.0 * 32 * 4096 * (64 + 64));
  }
}

TEST(MakePlanTest, ADeclinedProblemIsUnimplementedWithTheBackendsReason) {
  Problem problem = Small();
  problem.dropout = Dropout{0.5, 1};
  problem.score_output = ScoreOutput::kWeights;
  for (const Backend* backend : BuiltInBackends()) {
    if (!backend->Available().ok()) continue;
    const absl::Status supports = backend->Supports(problem);
    const absl::Status status =
        MakePlan(problem, {.backend = std::string(backend->name())}).status();
    if (supports.ok()) {
      EXPECT_TRUE(status.ok()) << status;
    } else {
      EXPECT_EQ(status.code(), absl::StatusCode::kUnimplemented);
      EXPECT_THAT(std::string(status.message()), HasSubstr(std::string(supports.message())));
    }
  }
}

TEST(RunTest, RejectsArgumentsThatDoNotFitTheProblem) {
  const Problem problem = Small();
  Rng rng(1);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.value = Tensor(DType::kFloat32, {2, 4, 299, 48});
  for (const Target& target : Targets()) {
    const absl::Status status = RunAttention(problem, inputs, target.Options()).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(std::string(status.message()), HasSubstr("299"));
  }
}

}  // namespace
}  // namespace rapt::test
