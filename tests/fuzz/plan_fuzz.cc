// Any problem is validated and planned. Every backend and instruction set computes accepted ones
// like the tests' oracle and writes only to its workspace and outputs.
#include <fuzzer/FuzzedDataProvider.h>
#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>

#include "attention/attention.h"
#include "base/check.h"
#include "tests/support/run_attention.h"

namespace rapt::test {
namespace {

constexpr DType kFloatTypes[] = {DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                 DType::kFloat64};
constexpr DType kMaskTypes[] = {DType::kBool,     DType::kFloat32, DType::kFloat16,
                                DType::kBFloat16, DType::kFloat64, DType::kInt64};

constexpr ScoreOutput kScoreOutputs[] = {ScoreOutput::kScores, ScoreOutput::kSoftcapped,
                                         ScoreOutput::kBiased, ScoreOutput::kWeights};

constexpr Alignment kAlignments[] = {Alignment::kTopLeft, Alignment::kBottomRight,
                                     Alignment::kOnnx};

constexpr Normalizer kNormalizers[] = {Normalizer::kSoftmax, Normalizer::kSoftmax,
                                       Normalizer::kSparsemax, Normalizer::kEntmax15,
                                       Normalizer::kEntmax};

RelativeVectors SomeVectors(const Problem& p, FuzzedDataProvider& data) {
  return {data.ConsumeBool() ? DType::kFloat32 : p.dtype, data.ConsumeBool() ? 1 : p.query_heads,
          2 * data.ConsumeIntegralInRange<int64_t>(0, 300) + 1};
}

// A problem that is valid in most cases, and small because the oracle is slow.
Problem SmallProblem(FuzzedDataProvider& data) {
  Problem p;
  p.dtype = data.PickValueInArray(kFloatTypes);
  p.batch = data.ConsumeIntegralInRange(0, 2);
  p.kv_heads = data.ConsumeIntegralInRange(1, 2);
  p.query_heads = p.kv_heads * data.ConsumeIntegralInRange(1, 3);
  p.query_length = data.ConsumeIntegralInRange(0, 70);
  p.key_length = data.ConsumeIntegralInRange(0, 140);
  p.past_length = data.ConsumeBool() ? data.ConsumeIntegralInRange(0, 30) : 0;
  p.head_size = data.ConsumeIntegralInRange(1, 40);
  p.value_head_size = data.ConsumeIntegralInRange(1, 40);
  if (data.ConsumeBool()) p.scale = data.ConsumeFloatingPointInRange(-2.0, 2.0);
  if (data.ConsumeBool()) p.softcap = data.ConsumeFloatingPointInRange(0.5, 50.0);
  p.causal = data.ConsumeBool();
  p.alignment = data.PickValueInArray(kAlignments);
  p.left_window = data.ConsumeIntegralInRange(-1, 80);
  p.right_window = data.ConsumeIntegralInRange(-1, 80);
  if (data.ConsumeBool()) {
    const auto axis = [&data](int64_t full) { return data.ConsumeBool() ? full : 1; };
    MaskShape mask;
    mask.dtype = data.PickValueInArray(kMaskTypes);
    mask.dims = {axis(p.batch), axis(p.query_heads), axis(p.query_length),
                 data.ConsumeIntegralInRange<int64_t>(0, p.total_keys() + 1)};
    p.mask = mask;
  }
  p.has_key_lengths = data.ConsumeBool();
  if (data.ConsumeBool()) {
    p.rotary_embedding_dim = data.ConsumeIntegralInRange(0, 12);
    p.interleaved = data.ConsumeBool();
    if (data.ConsumeBool()) p.rotary_keys = data.ConsumeBool();
    p.has_position_ids = data.ConsumeBool();
    p.has_key_position_ids = data.ConsumeBool();
    if (data.ConsumeBool()) {
      p.rope_theta = data.ConsumeIntegralInRange(2, 10000);
    } else {
      p.rotary_cache = RotaryCache{.dtype = p.dtype,
                                   .rows = data.ConsumeIntegralInRange(1, 180),
                                   .pairs = p.rotary_size() / 2};
      if (data.ConsumeBool()) p.rotary_cache->batch = p.batch;
      // Random lengths may place queries outside the rows of the cache, which is an error.
      if (p.alignment != Alignment::kTopLeft && p.rotary_cache->by_position() &&
          !p.has_position_ids) {
        p.has_key_lengths = false;
      }
    }
  }
  p.softmax_in_fp64 = data.ConsumeBool();
  if (data.ConsumeBool()) {
    p.dropout =
        Dropout{data.ConsumeFloatingPointInRange(0.0, 0.9), data.ConsumeIntegral<uint64_t>()};
  }
  if (data.ConsumeBool()) p.score_output = data.PickValueInArray(kScoreOutputs);
  if (data.ConsumeBool()) p.relative_values = SomeVectors(p, data);
  if (data.ConsumeBool()) {
    p.relative_keys = SomeVectors(p, data);
    p.has_relative_query = data.ConsumeBool();
  } else if (data.ConsumeBool()) {
    p.score_function = ScoreFunction::kAdditive;
    p.additive_weight =
        AdditiveWeight{data.PickValueInArray(kFloatTypes), data.ConsumeBool() ? p.query_heads : 1};
  }
  if (data.ConsumeBool()) {
    const int64_t block_q = data.ConsumeIntegralInRange(1, 80);
    const int64_t block_k = data.ConsumeIntegralInRange(1, 80);
    p.block_q = block_q;
    p.block_k = block_k;
    p.block_mask = {data.ConsumeBool() ? p.batch : 1, data.ConsumeBool() ? p.query_heads : 1,
                    (p.query_length + block_q - 1) / block_q,
                    (p.total_keys() + block_k - 1) / block_k};
  }
  if (data.ConsumeBool()) {
    p.selected = SelectedIndices{data.ConsumeBool() ? p.kv_heads : 1,
                                 data.ConsumeIntegralInRange<int64_t>(0, p.total_keys() + 3)};
  }
  p.prefix_keys = data.ConsumeIntegralInRange(0, 60);
  p.has_global_mask = data.ConsumeBool();
  p.wants_lse = data.ConsumeBool();
  p.wants_present = data.ConsumeBool();
  p.normalizer = data.PickValueInArray(kNormalizers);
  if (data.ConsumeBool()) p.alpha = data.ConsumeFloatingPointInRange(0.9, 2.1);
  if (data.ConsumeBool()) p.head_alpha = data.PickValueInArray(kFloatTypes);
  return p;
}

// Sets some of the fields to arbitrary values.
void Corrupt(Problem& p, FuzzedDataProvider& data) {
  int64_t* const axes[] = {&p.batch,       &p.query_heads, &p.kv_heads,  &p.query_length,
                           &p.key_length,  &p.past_length, &p.head_size, &p.value_head_size,
                           &p.left_window, &p.right_window};
  for (int64_t* axis : axes) {
    if (data.ConsumeBool()) *axis = data.ConsumeIntegral<int64_t>();
  }
  if (data.ConsumeBool()) p.scale = data.ConsumeFloatingPoint<double>();
  if (data.ConsumeBool()) p.softcap = data.ConsumeFloatingPoint<double>();
  if (data.ConsumeBool()) p.rotary_embedding_dim = data.ConsumeIntegral<int64_t>();
  if (data.ConsumeBool() && p.rotary_cache) {
    p.rotary_cache->rows = data.ConsumeIntegral<int64_t>();
    p.rotary_cache->pairs = data.ConsumeIntegral<int64_t>();
  }
  if (data.ConsumeBool() && p.mask) {
    for (int64_t& axis : p.mask->dims) axis = data.ConsumeIntegral<int64_t>();
  }
  for (std::optional<RelativeVectors>* const vectors : {&p.relative_keys, &p.relative_values}) {
    if (!*vectors || !data.ConsumeBool()) continue;
    (*vectors)->heads = data.ConsumeIntegral<int64_t>();
    (*vectors)->length = data.ConsumeIntegral<int64_t>();
  }
  if (data.ConsumeBool() && p.additive_weight) {
    p.additive_weight->heads = data.ConsumeIntegral<int64_t>();
  }
  if (data.ConsumeBool()) p.score_function = ScoreFunction::kAdditive;
  if (data.ConsumeBool()) p.block_q = data.ConsumeIntegral<int64_t>();
  if (data.ConsumeBool()) p.block_k = data.ConsumeIntegral<int64_t>();
  if (data.ConsumeBool() && p.block_mask) {
    for (int64_t& axis : *p.block_mask) axis = data.ConsumeIntegral<int64_t>();
  }
  if (data.ConsumeBool()) {
    p.selected = SelectedIndices{data.ConsumeIntegral<int64_t>(), data.ConsumeIntegral<int64_t>()};
  }
  if (data.ConsumeBool()) p.prefix_keys = data.ConsumeIntegral<int64_t>();
  if (data.ConsumeBool() && p.dropout) {
    p.dropout->probability = data.ConsumeFloatingPoint<double>();
  }
}

// Checks that validation and planning agree, and that the plan is plausible.
bool CheckPlan(const Problem& problem, int threads) {
  const absl::Status valid = Validate(problem);
  const absl::StatusOr<Plan> plan = MakePlan(problem, {.threads = threads});
  RAPT_CHECK(valid.ok() == plan.ok(), "exactly the valid problems have a plan");
  if (!valid.ok()) {
    RAPT_CHECK(absl::IsInvalidArgument(valid) && !valid.message().empty(),
               "an error without a message or with a wrong code");
    return false;
  }
  RAPT_CHECK(plan->workspace_bytes() >= 0 && plan->flops >= 0, "a plan overflows");
  RAPT_CHECK(!plan->Describe().empty(), "a plan has no description");
  for (const int64_t tasks : plan->stages) RAPT_CHECK(tasks >= 0, "a stage has negative tasks");
  return true;
}

void Check(FuzzedDataProvider data) {
  const int threads = data.ConsumeIntegralInRange(1, 3);
  const bool spoiled = data.ConsumeBool();
  const uint64_t seed = data.ConsumeIntegral<uint64_t>();
  Problem problem = SmallProblem(data);
  if (spoiled) Corrupt(problem, data);
  if (!CheckPlan(problem, threads) || spoiled) return;
  Rng rng(seed);
  ExpectConforms(problem, RandomInputs(problem, rng), threads);
}

}  // namespace
}  // namespace rapt::test

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  ::testing::GTEST_FLAG(break_on_failure) = true;
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  rapt::test::Check(FuzzedDataProvider(data, size));
  return 0;
}
