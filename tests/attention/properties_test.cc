// Properties of attention that hold for all inputs; these tests need no oracle.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <numeric>
#include <string>
#include <thread>
#include <vector>

#include "attention/mechanism/softmax/softmax_state.h"
#include "base/aligned_buffer.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

constexpr double kInf = std::numeric_limits<double>::infinity();
constexpr uint64_t kSeed = 4242;
constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat64};

PlanOptions On(const Target& target, int threads = 1) { return target.Options(threads); }

// Each property is tested in each float type on each target.
class PropertiesTest : public ::testing::TestWithParam<DType> {
 protected:
  Problem Make(const std::function<void(Problem&)>& change = [](Problem&) {}) const {
    Problem problem{.dtype = GetParam(),
                    .batch = 2,
                    .query_heads = 4,
                    .kv_heads = 2,
                    .query_length = 19,
                    .key_length = 133,
                    .head_size = 24,
                    .value_head_size = 17};
    change(problem);
    return problem;
  }

  Inputs Random(const Problem& problem) {
    Rng rng(kSeed);
    return RandomInputs(problem, rng);
  }

  // For two results of the same sum in different orders, each within tolerance of the exact one.
  Tolerance TwoSided(double slack = 0) const {
    Tolerance tolerance{2 * ToleranceOf(GetParam()), {}};
    const Problem problem = Make();
    tolerance.row_slack.assign(problem.batch * problem.query_heads * problem.query_length, slack);
    return tolerance;
  }

  void ExpectSameOutput(const Problem& a, const Inputs& of_a, const Problem& b,
                        const Inputs& of_b) {
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name() + " seed " + std::to_string(kSeed) + "\n" + ToText(a) + "\n" +
                   ToText(b));
      const auto got_a = RunAttention(a, of_a, On(target));
      const auto got_b = RunAttention(b, of_b, On(target));
      ASSERT_TRUE(got_a.ok()) << got_a.status();
      ASSERT_TRUE(got_b.ok()) << got_b.status();
      EXPECT_TRUE(AllClose("output", got_a->output, got_b->output.ToVector(), TwoSided()));
    }
  }
};

INSTANTIATE_TEST_SUITE_P(Types, PropertiesTest, ::testing::ValuesIn(kFloatTypes),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

// A plan whose tasks run one after the other, each with a checkpoint.
class TaskByTask {
 public:
  TaskByTask(const Problem& problem, const Inputs& inputs, const PlanOptions& options)
      : plan_(MakePlan(problem, options).value()),
        output_(problem.dtype, {problem.batch, problem.query_heads, problem.query_length,
                                problem.value_head_size}),
        workspace_(static_cast<size_t>(plan_.workspace_bytes())) {
    arguments_.inputs[Role::kQ] = inputs.query.View();
    arguments_.inputs[Role::kK] = inputs.key.View();
    arguments_.inputs[Role::kV] = inputs.value.View();
    arguments_.outputs[Role::kY] = output_.MutableView();
  }

  const Plan& plan() const { return plan_; }
  void RunTask(int stage, int64_t task, const Checkpoint& checkpoint) {
    plan_.routing.backend->RunTask(plan_, arguments_, workspace_.data(), stage, task, 0,
                                   checkpoint);
  }
  std::vector<double> Run(const Checkpoint& checkpoint) {
    for (size_t stage = 0; stage < plan_.stages.size(); ++stage) {
      for (int64_t task = 0; task < plan_.stages[stage]; ++task) {
        RunTask(static_cast<int>(stage), task, checkpoint);
      }
    }
    return output_.ToVector();
  }

 private:
  const Plan plan_;
  Tensor output_;
  AlignedBuffer workspace_;
  Arguments arguments_;
};

// Several checkpoints per task.
void ManyKeys(Problem& p) {
  p.query_length = 60;
  p.key_length = 3000;
}

TEST_P(PropertiesTest, WorkAtACheckpointDoesNotChangeTheResult) {
  const Problem problem = Make(ManyKeys), other = Make();
  const Inputs inputs = Random(problem), of_other = Random(other);
  for (const Target& target : Targets()) {
    if (target.backend != "cpu") continue;  // the only one with checkpoints
    SCOPED_TRACE(target.Name());
    struct Interruption {
      TaskByTask task;
      int count = 0;
    } interruption{TaskByTask(other, of_other, On(target))};
    const Checkpoint checkpoint{[](void* context) {
                                  auto& interruption = *static_cast<Interruption*>(context);
                                  interruption.task.Run({});
                                  ++interruption.count;
                                  return true;
                                },
                                &interruption};
    const std::vector<double> alone = TaskByTask(problem, inputs, On(target)).Run({});
    EXPECT_EQ(TaskByTask(problem, inputs, On(target)).Run(checkpoint), alone);
    EXPECT_GT(interruption.count, 4);
  }
}

TEST_P(PropertiesTest, ATaskCanBeAbandonedAtACheckpoint) {
  const Problem problem = Make(ManyKeys);
  const Inputs inputs = Random(problem);
  for (const Target& target : Targets()) {
    if (target.backend != "cpu") continue;
    SCOPED_TRACE(target.Name());
    int passed = 0;
    const Checkpoint checkpoint{[](void* passed) { return ++*static_cast<int*>(passed) < 2; },
                                &passed};
    TaskByTask(problem, inputs, On(target)).RunTask(0, 0, checkpoint);
    EXPECT_EQ(passed, 2);
  }
}

TEST_P(PropertiesTest, ConstantValuesAreReturned) {
  const Problem problem = Make([](Problem& p) {
    p.causal = true;
    p.softcap = 2;
  });
  Inputs inputs = Random(problem);
  std::vector<double> want;
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < problem.kv_heads; ++h) {
      for (int64_t j = 0; j < problem.key_length; ++j) {
        for (int64_t e = 0; e < problem.value_head_size; ++e) {
          inputs.value.Set(b, h, j, e, inputs.value.At(b, h, 0, e));
        }
      }
    }
  }
  for (int64_t b = 0; b < problem.batch; ++b) {
    for (int64_t h = 0; h < problem.query_heads; ++h) {
      for (int64_t i = 0; i < problem.query_length; ++i) {
        for (int64_t e = 0; e < problem.value_head_size; ++e) {
          want.push_back(inputs.value.At(b, h / problem.group_size(), 0, e));
        }
      }
    }
  }
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const auto got = RunAttention(problem, inputs, On(target));
    ASSERT_TRUE(got.ok()) << got.status();
    EXPECT_TRUE(AllClose("output", got->output, want, {ToleranceOf(GetParam()), {}}));
  }
}

TEST_P(PropertiesTest, PermutingKeysChangesNothing) {
  const Problem problem = Make([](Problem& p) {
    p.mask = MaskShape{DType::kFloat32, {1, 1, 19, 133}};
  });
  const Inputs inputs = Random(problem);
  std::vector<int64_t> order(problem.key_length);
  std::iota(order.begin(), order.end(), 0);
  Rng rng(kSeed);
  std::shuffle(order.begin(), order.end(), rng);

  Inputs permuted = inputs;
  for (int64_t j = 0; j < problem.key_length; ++j) {
    for (int64_t b = 0; b < problem.batch; ++b) {
      for (int64_t h = 0; h < problem.kv_heads; ++h) {
        for (int64_t e = 0; e < problem.head_size; ++e) {
          permuted.key.Set(b, h, j, e, inputs.key.At(b, h, order[j], e));
        }
        for (int64_t e = 0; e < problem.value_head_size; ++e) {
          permuted.value.Set(b, h, j, e, inputs.value.At(b, h, order[j], e));
        }
      }
    }
    for (int64_t i = 0; i < problem.query_length; ++i) {
      permuted.mask->Set(0, 0, i, j, inputs.mask->At(0, 0, i, order[j]));
    }
  }
  ExpectSameOutput(problem, inputs, problem, permuted);
}

TEST_P(PropertiesTest, CausalityWindowAndLengthsAreMasks) {
  const Problem by_rule = Make([](Problem& p) {
    p.causal = true;
    p.left_window = 60;
    p.has_key_lengths = true;
    p.alignment = Alignment::kBottomRight;
  });
  Inputs inputs = Random(by_rule);
  inputs.key_lengths = {130, 120};
  const Problem by_mask = Make([](Problem& p) {
    p.mask = MaskShape{DType::kBool, {2, 1, 19, 133}};
  });
  Inputs masked = inputs;
  masked.key_lengths.clear();
  masked.mask = Tensor(DType::kBool, by_mask.mask->dims);
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t i = 0; i < 19; ++i) {
      for (int64_t j = 0; j < 133; ++j) {
        masked.mask->Set(b, 0, i, j, IsVisible(by_rule, inputs.key_lengths, b, i, j));
      }
    }
  }
  ExpectSameOutput(by_rule, inputs, by_mask, masked);
}

TEST_P(PropertiesTest, SharedHeadsAreRepeatedHeads) {
  const Problem shared = Make();
  const Inputs inputs = Random(shared);
  const Problem repeated = Make([](Problem& p) { p.kv_heads = 4; });
  Inputs copies{.query = inputs.query,
                .key = Tensor(GetParam(), {2, 4, 133, 24}),
                .value = Tensor(GetParam(), {2, 4, 133, 17})};
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 4; ++h) {
      for (int64_t j = 0; j < 133; ++j) {
        for (int64_t e = 0; e < 24; ++e) copies.key.Set(b, h, j, e, inputs.key.At(b, h / 2, j, e));
        for (int64_t e = 0; e < 17; ++e) {
          copies.value.Set(b, h, j, e, inputs.value.At(b, h / 2, j, e));
        }
      }
    }
  }
  ExpectSameOutput(shared, inputs, repeated, copies);
}

TEST_P(PropertiesTest, PastIsJustEarlierKeys) {
  const Problem split = Make([](Problem& p) {
    p.past_length = 50;
    p.key_length = 83;
  });
  const Inputs inputs = Random(split);
  const Problem whole = Make();
  Inputs joined{.query = inputs.query,
                .key = Tensor(GetParam(), {2, 2, 133, 24}),
                .value = Tensor(GetParam(), {2, 2, 133, 17})};
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t h = 0; h < 2; ++h) {
      for (int64_t j = 0; j < 133; ++j) {
        const bool past = j < 50;
        for (int64_t e = 0; e < 24; ++e) {
          joined.key.Set(b, h, j, e,
                         past ? inputs.past_key->At(b, h, j, e) : inputs.key.At(b, h, j - 50, e));
        }
        for (int64_t e = 0; e < 17; ++e) {
          joined.value.Set(
              b, h, j, e,
              past ? inputs.past_value->At(b, h, j, e) : inputs.value.At(b, h, j - 50, e));
        }
      }
    }
  }
  ExpectSameOutput(split, inputs, whole, joined);
}

TEST_P(PropertiesTest, AConstantAddedToARowShiftsOnlyTheLse) {
  const Problem plain = Make([](Problem& p) {
    p.wants_lse = true;
    p.score_output = ScoreOutput::kWeights;
  });
  Problem shifted = plain;
  shifted.mask = MaskShape{DType::kFloat32, {1, 1, 19, 1}};
  const Inputs inputs = Random(plain);
  Inputs with_shift = inputs;
  with_shift.mask = Tensor(DType::kFloat32, {1, 1, 19, 1});
  for (int64_t i = 0; i < 19; ++i) with_shift.mask->Set(0, 0, i, 0, 10.0 * (i - 9));
  const double largest = 100 + 24;
  const Tolerance tolerance =
      TwoSided(8 * largest * (plain.accumulator() == DType::kFloat64 ? 0x1p-53 : 0x1p-24));
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const auto a = RunAttention(plain, inputs, On(target));
    const auto b = RunAttention(shifted, with_shift, On(target));
    ASSERT_TRUE(a.ok()) << a.status();
    ASSERT_TRUE(b.ok()) << b.status();
    EXPECT_TRUE(AllClose("output", b->output, a->output.ToVector(), tolerance));
    EXPECT_TRUE(AllClose("weights", *b->scores, a->scores->ToVector(), tolerance));
    std::vector<double> want = a->lse->ToVector();
    for (size_t row = 0; row < want.size(); ++row) want[row] += 10.0 * (row % 19) - 90;
    EXPECT_TRUE(AllClose("lse", *b->lse, want, tolerance));
  }
}

TEST_P(PropertiesTest, WeightsAreADistributionAndGiveTheOutput) {
  const Problem problem = Make([](Problem& p) {
    p.mask = MaskShape{DType::kBool, {2, 1, 19, 133}};
    p.score_output = ScoreOutput::kWeights;
  });
  Inputs inputs = Random(problem);
  for (int64_t j = 0; j < 133; ++j) inputs.mask->Set(1, 0, 7, j, 0);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const auto got = RunAttention(problem, inputs, On(target));
    ASSERT_TRUE(got.ok()) << got.status();
    std::vector<double> from_weights;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t i = 0; i < 19; ++i) {
          double sum = 0;
          std::vector<double> row(17);
          for (int64_t j = 0; j < 133; ++j) {
            const double weight = got->scores->At(b, h, i, j);
            ASSERT_GE(weight, 0) << b << " " << h << " " << i << " " << j;
            sum += weight;
            for (int64_t e = 0; e < 17; ++e) row[e] += weight * inputs.value.At(b, h / 2, j, e);
          }
          from_weights.insert(from_weights.end(), row.begin(), row.end());
          const bool empty = b == 1 && i == 7;
          const double allowed = SizeOf(GetParam()) == 2 ? ToleranceOf(GetParam()) : 1e-6;
          EXPECT_NEAR(sum, empty ? 0 : 1, empty ? 0 : allowed) << b << " " << h << " " << i;
        }
      }
    }
    EXPECT_TRUE(AllClose("output", got->output, from_weights, TwoSided()));
  }
}

// The scores are computed twice, for the sum and for the weights. Both must be bit-identical, for
// few query rows and for many.
TEST_P(PropertiesTest, TheOnlyVisibleKeyHasAllTheWeight) {
  for (const int64_t length : {1, 3, 19, 64}) {
    const Problem problem = Make([length](Problem& p) {
      p.query_length = length;
      p.left_window = p.right_window = 0;
      p.score_output = ScoreOutput::kWeights;
    });
    const Inputs inputs = Random(problem);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name() + " queries " + std::to_string(length));
      const auto got = RunAttention(problem, inputs, On(target));
      ASSERT_TRUE(got.ok()) << got.status();
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t h = 0; h < 4; ++h) {
          for (int64_t i = 0; i < length; ++i) EXPECT_EQ(got->scores->At(b, h, i, i), 1);
        }
      }
    }
  }
}

TEST_P(PropertiesTest, DroppedWeightsGiveTheOutput) {
  const Problem problem = Make([](Problem& p) {
    p.dropout = Dropout{0.3, 17};
    p.score_output = ScoreOutput::kWeights;
  });
  const Inputs inputs = Random(problem);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const auto got = RunAttention(problem, inputs, On(target));
    ASSERT_TRUE(got.ok()) << got.status();
    int64_t dropped = 0;
    std::vector<double> from_weights;
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t h = 0; h < 4; ++h) {
        for (int64_t i = 0; i < 19; ++i) {
          std::vector<double> row(17);
          for (int64_t j = 0; j < 133; ++j) {
            const double weight = got->scores->At(b, h, i, j);
            dropped += weight == 0;
            for (int64_t e = 0; e < 17; ++e) row[e] += weight * inputs.value.At(b, h / 2, j, e);
          }
          from_weights.insert(from_weights.end(), row.begin(), row.end());
        }
      }
    }
    EXPECT_TRUE(AllClose("output", got->output, from_weights, TwoSided()));
    EXPECT_NEAR(static_cast<double>(dropped) / (2 * 4 * 19 * 133), 0.3, 0.02);
  }
}

TEST_P(PropertiesTest, AnotherSeedDropsOtherWeights) {
  const Problem one = Make([](Problem& p) { p.dropout = Dropout{0.5, 1}; });
  for (const uint64_t seed : {uint64_t{2}, uint64_t{1} << 32 | 1}) {
    Problem other = one;
    other.dropout->seed = seed;
    const Inputs inputs = Random(one);
    for (const Target& target : Targets()) {
      const auto a = RunAttention(one, inputs, On(target));
      const auto b = RunAttention(other, inputs, On(target));
      ASSERT_TRUE(a.ok() && b.ok());
      EXPECT_FALSE(SameBits("output", a->output, b->output)) << target.Name();
    }
  }
}

TEST_P(PropertiesTest, TheSamePlanGivesTheSameBits) {
  const Problem prefill = Make([](Problem& p) {
    p.causal = true;
    p.wants_lse = true;
    p.score_output = ScoreOutput::kWeights;
  });
  const Problem decode = Make([](Problem& p) {
    p.batch = 1;
    p.query_heads = p.kv_heads = 1;
    p.query_length = 1;
    p.key_length = 3000;
    p.wants_lse = true;
    p.score_output = ScoreOutput::kWeights;
  });
  for (const Problem& problem : {prefill, decode}) {
    const Inputs inputs = Random(problem);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name());
      const auto first = RunAttention(problem, inputs, On(target, 5));
      ASSERT_TRUE(first.ok()) << first.status();
      for (const int workers : {5, 5, 5, 2, 1}) {
        const auto again =
            RunAttention(problem, inputs, On(target, 5), Storage::kRowMajor, workers);
        ASSERT_TRUE(again.ok()) << again.status();
        EXPECT_EQ(again->plan, first->plan);
        EXPECT_TRUE(SameBits("output", again->output, first->output));
        EXPECT_TRUE(SameBits("lse", *again->lse, *first->lse));
        EXPECT_TRUE(SameBits("weights", *again->scores, *first->scores));
      }
    }
  }
}

TEST_P(PropertiesTest, BatchRowsAreIndependent) {
  const Problem problem = Make([](Problem& p) { p.wants_lse = true; });
  const Inputs inputs = Random(problem);
  Inputs changed = inputs;
  for (Tensor* tensor : {&changed.query, &changed.key, &changed.value}) {
    const Dims& dims = tensor->dims();
    for (int64_t h = 0; h < dims[1]; ++h) {
      for (int64_t s = 0; s < dims[2]; ++s) {
        for (int64_t e = 0; e < dims[3]; ++e) tensor->Set(1, h, s, e, 0.25 * (e % 3));
      }
    }
  }
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const auto a = RunAttention(problem, inputs, On(target, 2));
    const auto b = RunAttention(problem, changed, On(target, 2));
    ASSERT_TRUE(a.ok() && b.ok());
    for (int64_t h = 0; h < problem.query_heads; ++h) {
      for (int64_t i = 0; i < problem.query_length; ++i) {
        for (int64_t e = 0; e < problem.value_head_size; ++e) {
          ASSERT_EQ(a->output.At(0, h, i, e), b->output.At(0, h, i, e))
              << h << " " << i << " " << e;
        }
        ASSERT_EQ(a->lse->At(0, h, i, 0), b->lse->At(0, h, i, 0));
      }
    }
    EXPECT_NE(a->output.At(1, 0, 0, 0), b->output.At(1, 0, 0, 0));
  }
}

// Callers with separate workspaces and outputs share one plan and one pool.
TEST_P(PropertiesTest, RunIsSafeFromSeveralThreads) {
  const Problem problem = Make();
  const Inputs inputs = Random(problem);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const auto alone = RunAttention(problem, inputs, On(target, 2));
    ASSERT_TRUE(alone.ok()) << alone.status();
    std::vector<absl::StatusOr<Outputs>> results(4, absl::UnknownError("not run"));
    {
      std::vector<std::jthread> callers;
      for (auto& result : results) {
        callers.emplace_back([&] { result = RunAttention(problem, inputs, On(target, 2)); });
      }
    }
    for (const auto& result : results) {
      ASSERT_TRUE(result.ok()) << result.status();
      EXPECT_TRUE(SameBits("output", result->output, alone->output));
    }
  }
}

// Returns keys [begin, begin + part.key_length) as the inputs of a separate problem.
Inputs KeysOf(const Problem& part, const Inputs& inputs, int64_t begin) {
  Inputs slice{
      .query = inputs.query,
      .key = Tensor(part.dtype, {part.batch, part.kv_heads, part.key_length, part.head_size}),
      .value =
          Tensor(part.dtype, {part.batch, part.kv_heads, part.key_length, part.value_head_size}),
      .mask = Tensor(DType::kBool, part.mask->dims)};
  for (int64_t j = 0; j < part.key_length; ++j) {
    for (int64_t b = 0; b < part.batch; ++b) {
      for (int64_t h = 0; h < part.kv_heads; ++h) {
        for (int64_t e = 0; e < part.head_size; ++e) {
          slice.key.Set(b, h, j, e, inputs.key.At(b, h, begin + j, e));
        }
        for (int64_t e = 0; e < part.value_head_size; ++e) {
          slice.value.Set(b, h, j, e, inputs.value.At(b, h, begin + j, e));
        }
      }
    }
    for (int64_t i = 0; i < part.query_length; ++i) {
      slice.mask->Set(0, 0, i, j, inputs.mask->At(0, 0, i, begin + j));
    }
  }
  return slice;
}

// Returns row (b, h, i) of an output in the type of its sums.
template <typename Real>
std::vector<Real> RowOf(const Tensor& tensor, int64_t b, int64_t h, int64_t i) {
  std::vector<Real> row;
  for (int64_t e = 0; e < tensor.dims()[3]; ++e) row.push_back(tensor.At(b, h, i, e));
  return row;
}

template <typename Real>
void ExpectMergedPartsEqualOneCall(DType dtype) {
  const Problem whole{.dtype = dtype,
                      .batch = 2,
                      .query_heads = 4,
                      .kv_heads = 2,
                      .query_length = 6,
                      .key_length = 200,
                      .head_size = 16,
                      .value_head_size = 9,
                      .mask = MaskShape{DType::kBool, {1, 1, 6, 200}},
                      .wants_lse = true};
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(whole, rng);
  for (int64_t j = 0; j < 200; ++j) {
    inputs.mask->Set(0, 0, 0, j, 0);        // nothing visible
    inputs.mask->Set(0, 0, 1, j, j >= 70);  // nothing visible in the first part
    inputs.mask->Set(0, 0, 2, j, j < 70);   // only the first part visible
  }
  constexpr int64_t kBoundaries[] = {0, 70, 70, 71, 200};
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const auto expected = RunAttention(whole, inputs, On(target));
    ASSERT_TRUE(expected.ok()) << expected.status();
    Tensor output(dtype, {2, 4, 6, 9});
    Tensor lse(whole.lse_dtype(), {2, 4, 6, 1});
    output.Fill(0);
    lse.Fill(-kInf);
    for (int n = 0; n < 4; ++n) {
      Problem part = whole;
      part.key_length = kBoundaries[n + 1] - kBoundaries[n];
      part.mask->dims[3] = part.key_length;
      Inputs slice = KeysOf(part, inputs, kBoundaries[n]);
      if (part.key_length == 0) {
        part.mask.reset();
        slice.mask.reset();
      }
      const auto got = RunAttention(part, slice, On(target));
      ASSERT_TRUE(got.ok()) << got.status();
      for (int64_t b = 0; b < 2; ++b) {
        for (int64_t h = 0; h < 4; ++h) {
          for (int64_t i = 0; i < 6; ++i) {
            std::vector<Real> merged = RowOf<Real>(output, b, h, i);
            const std::vector<Real> added = RowOf<Real>(got->output, b, h, i);
            Real merged_lse = lse.At(b, h, i, 0);
            MergeInto<Real>(absl::MakeSpan(merged), merged_lse, added, got->lse->At(b, h, i, 0));
            for (int64_t e = 0; e < 9; ++e) output.Set(b, h, i, e, merged[e]);
            lse.Set(b, h, i, 0, merged_lse);
          }
        }
      }
    }
    const Tolerance tolerance{2 * ToleranceOf(dtype), {}};
    EXPECT_TRUE(AllClose("output", output, expected->output.ToVector(), tolerance));
    EXPECT_TRUE(AllClose("lse", lse, expected->lse->ToVector(), tolerance));
  }
}

TEST(SoftmaxStateTest, MergedPartsEqualOneCall) {
  ExpectMergedPartsEqualOneCall<float>(DType::kFloat32);
  ExpectMergedPartsEqualOneCall<double>(DType::kFloat64);
}

}  // namespace
}  // namespace rapt::test
