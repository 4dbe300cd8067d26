// Problems computed by one joined run: each has the same result as a separate run.
#include <gtest/gtest.h>

#include <vector>

#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

constexpr DType kTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16};

// Returns the properties that all problems of one run share.
Problem RandomKind(DType dtype, Rng& rng) {
  constexpr int64_t kHeads[][2] = {{2, 1}, {2, 2}, {6, 2}};
  constexpr int64_t kSizes[][2] = {{8, 8}, {16, 8}, {5, 11}};
  const auto& [query_heads, kv_heads] = kHeads[UniformInt(rng, 0, 2)];
  const auto& [head_size, value_head_size] = kSizes[UniformInt(rng, 0, 2)];
  Problem kind{.dtype = dtype,
               .query_heads = query_heads,
               .kv_heads = kv_heads,
               .query_length = UniformInt(rng, 0, 1),  // 1: a decode step; 0: any length
               .head_size = head_size,
               .value_head_size = value_head_size};
  if (UniformInt(rng, 0, 2) == 0) kind.scale = 0.3;
  kind.causal = UniformInt(rng, 0, 1) == 1;
  kind.alignment = static_cast<Alignment>(UniformInt(rng, 0, 2));
  if (UniformInt(rng, 0, 3) == 0) kind.left_window = UniformInt(rng, 0, 9);
  if (UniformInt(rng, 0, 5) == 0) kind.right_window = UniformInt(rng, 0, 9);
  return kind;
}

Problem RandomMember(Problem problem, Rng& rng) {
  problem.batch = UniformInt(rng, 1, 3);
  if (problem.query_length != 1) problem.query_length = UniformInt(rng, 1, 20);
  problem.key_length = UniformInt(rng, 1, 40);
  if (UniformInt(rng, 0, 2) == 0) problem.past_length = UniformInt(rng, 1, 20);
  problem.has_key_lengths = UniformInt(rng, 0, 2) == 0;
  problem.wants_lse = UniformInt(rng, 0, 1) == 1;
  return problem;
}

// A device compiles kernels in the order of requests, so a problem that has not been requested
// before is ready last.
void WaitForKernels(const PlanOptions& options) {
  static int64_t batch = 100;
  const Problem last{.batch = ++batch,
                     .query_heads = 1,
                     .kv_heads = 1,
                     .query_length = 1,
                     .key_length = 1,
                     .head_size = 8,
                     .value_head_size = 8};
  Rng rng(1);
  EXPECT_TRUE(RunAttention(last, RandomInputs(last, rng), options).ok());
}

// Runs everything twice, because a device may compile the joined run's kernels after the first
// time.
void ExpectEachConforms(const std::vector<Problem>& problems, const std::vector<Inputs>& inputs) {
  std::vector<Expected> expected;
  for (size_t n = 0; n < problems.size(); ++n) {
    expected.push_back(Attend(problems[n], inputs[n]));
  }
  for (const Target& target : Targets()) {
    const PlanOptions options = target.Options();
    for (int run = 0; run < 2; ++run) {
      const std::vector<Outputs> outputs = RunBatched(problems, inputs, options);
      for (size_t n = 0; n < problems.size(); ++n) {
        EXPECT_TRUE(Matches(problems[n], outputs[n], expected[n]))
            << target.Name() << " run " << run << " " << ToText(problems[n]);
      }
      WaitForKernels(options);
    }
  }
}

TEST(JoinedRunsTest, EachProblemHasItsOwnResult) {
  Rng rng(7);
  for (int round = 0; round < 18; ++round) {
    const Problem kind = RandomKind(kTypes[round % 3], rng);
    std::vector<Problem> problems;
    std::vector<Inputs> inputs;
    for (int n = 0; n < 4; ++n) {
      problems.push_back(RandomMember(kind, rng));
      inputs.push_back(RandomInputs(problems.back(), rng));
    }
    ExpectEachConforms(problems, inputs);
  }
}

}  // namespace
}  // namespace rapt::test
