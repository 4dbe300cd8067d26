// Rotary embedding of Q and K on every backend and instruction set, in every type.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "attention/attention.h"
#include "attention/cpu/instruction_sets.h"
#include "attention/mechanism/softmax/chunked.h"
#include "attention/rotary/angles.h"
#include "attention/rotary/checks.h"
#include "attention/rotary/rotate.h"
#include "attention/rotary/rotation.h"
#include "attention/score/score_params.h"
#include "tests/support/run_attention.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kSeed = 20241127;
constexpr int64_t kQueries = 17;
constexpr int64_t kKeys = 70;
constexpr int64_t kRows = 100;  // of the caches by position

// The ways to give the angles.
std::vector<Problem> WithEachRotation(const Problem& problem) {
  std::vector<Problem> problems(6, problem);
  problems[0].rope_theta = 10000;
  problems[1].rope_theta = 3.5;
  problems[1].interleaved = true;
  problems[1].rotary_embedding_dim = 10;
  problems[1].has_position_ids = true;
  problems[2].rotary_cache = RotaryCache{.dtype = problem.dtype, .rows = kRows, .pairs = 21};
  problems[3].rotary_cache = RotaryCache{.rows = kRows, .pairs = 18};
  problems[3].rotary_embedding_dim = 36;
  problems[3].has_position_ids = true;
  problems[3].has_key_position_ids = true;
  problems[4].rotary_cache = RotaryCache{.rows = kRows, .pairs = 21};
  problems[4].interleaved = true;
  problems[4].rotary_keys = false;
  problems[5].rotary_cache =
      RotaryCache{.batch = problem.batch, .rows = problem.query_length, .pairs = 20};
  problems[5].rotary_embedding_dim = 40;
  problems[5].rotary_keys = problem.query_length == problem.key_length;
  return problems;
}

class RotaryTest : public ::testing::TestWithParam<DType> {
 protected:
  static Problem Make() {
    return {.dtype = GetParam(),
            .batch = 2,
            .query_heads = 6,
            .kv_heads = 2,
            .query_length = kQueries,
            .key_length = kKeys,
            .head_size = 42,
            .value_head_size = 17,
            .wants_lse = true};
  }

  static Inputs InputsFor(const Problem& problem, const Arrangement& arrangement = {}) {
    Rng rng(kSeed);
    Inputs inputs = RandomInputs(problem, rng, arrangement);
    // No query is before the first key.
    for (int64_t& length : inputs.key_lengths) length = std::max(length, problem.query_length);
    return inputs;
  }
};

TEST_P(RotaryTest, MatchesTheDefinition) {
  std::vector<Problem> places(10, Make());
  places[1].causal = true;
  places[1].alignment = Alignment::kBottomRight;
  places[2].past_length = 9;
  places[2].wants_present = true;
  places[3].has_key_lengths = true;
  places[3].alignment = Alignment::kOnnx;
  places[3].left_window = 12;
  places[4].query_length = kKeys;
  places[4].score_output = ScoreOutput::kWeights;
  places[5].query_length = 1;
  places[5].key_length = 1;
  places[5].past_length = 69;
  places[5].wants_present = true;
  places[6].alibi = true;
  places[6].score_output = ScoreOutput::kScores;
  // Few enough rows to read each key once.
  places[7].query_length = 2;
  places[7].past_length = 9;
  places[8].query_length = 15;
  places[8].past_length = 9;
  places[8].causal = true;
  places[9].query_length = 12;
  places[9].key_length = 12;
  places[9].score_output = ScoreOutput::kWeights;
  for (const Problem& place : places) {
    for (const Problem& problem : WithEachRotation(place)) {
      ExpectConforms(problem, InputsFor(problem));
    }
  }
}

TEST_P(RotaryTest, MatchesTheDefinitionInAnyStorage) {
  for (const Storage storage : {Storage::kBshd, Storage::kMisaligned, Storage::kPaddedRows}) {
    for (const Problem& problem : WithEachRotation(Make())) {
      ExpectConforms(problem, InputsFor(problem, {storage, storage, storage}));
    }
  }
}

TEST_P(RotaryTest, MatchesTheDefinitionWithSplitKeys) {
  Problem problem = Make();
  problem.query_heads = 2;
  problem.query_length = 2;
  problem.key_length = 2200;
  problem.rope_theta = 10000;
  ExpectConforms(problem, InputsFor(problem), /*threads=*/16);
}

// Rotates rows one by one, as if before the call.
Tensor RotateFirst(const Problem& p, const Inputs& inputs, bool is_key) {
  Tensor rows = is_key ? inputs.key : inputs.query;
  const Tensor& cos_cache = *inputs.cos_cache;
  const int64_t pairs = p.rotary_cache->pairs;
  for (int64_t b = 0; b < rows.dims()[0]; ++b) {
    for (int64_t h = 0; h < rows.dims()[1]; ++h) {
      for (int64_t s = 0; s < rows.dims()[2]; ++s) {
        const int64_t position = p.past_length + s;
        std::vector<double> cos(pairs), sin(pairs);
        std::vector<float> cos32(pairs), sin32(pairs);
        for (int64_t t = 0; t < pairs; ++t) {
          cos32[t] = static_cast<float>(cos[t] = cos_cache.At(position, t, 0, 0));
          sin32[t] = static_cast<float>(sin[t] = inputs.sin_cache->At(position, t, 0, 0));
        }
        const bool is_fp64 = p.dtype == DType::kFloat64;
        std::byte* const row = rows.MutableView().Row(b, h, s);
        RotateRow({.from = row,
                   .to = row,
                   .cos = is_fp64 ? reinterpret_cast<std::byte*>(cos.data())
                                  : reinterpret_cast<std::byte*>(cos32.data()),
                   .sin = is_fp64 ? reinterpret_cast<std::byte*>(sin.data())
                                  : reinterpret_cast<std::byte*>(sin32.data()),
                   .pairs = pairs,
                   .size = p.head_size,
                   .interleaved = p.interleaved,
                   .element = ElementOf(p.dtype)});
      }
    }
  }
  return rows;
}

TEST_P(RotaryTest, EqualsRotationBeforeTheCallToTheBit) {
  for (const bool interleaved : {false, true}) {
    for (const int64_t size : {int64_t{42}, int64_t{32}, int64_t{2}}) {
      for (const int64_t queries : {kQueries, int64_t{2}}) {
        Problem problem = Make();
        problem.query_length = queries;
        problem.past_length = 3;
        problem.wants_present = queries == kQueries;  // otherwise keys are rotated when read
        problem.causal = true;
        problem.score_output = ScoreOutput::kScores;
        Problem rotated = problem;
        problem.interleaved = interleaved;
        problem.rotary_embedding_dim = size;
        problem.rotary_cache = RotaryCache{.rows = kRows, .pairs = size / 2};
        const Inputs inputs = InputsFor(problem);
        Inputs before = inputs;
        before.query = RotateFirst(problem, inputs, /*is_key=*/false);
        before.key = RotateFirst(problem, inputs, /*is_key=*/true);
        ExpectSameOutputs(problem, inputs, rotated, before);
      }
    }
  }
}

TEST_P(RotaryTest, DefaultPositionsAreThoseOfTheIds) {
  Problem problem = Make();
  problem.past_length = 5;
  problem.causal = true;
  problem.rope_theta = 100;
  const Inputs inputs = InputsFor(problem);
  Problem with_ids = problem;
  with_ids.has_position_ids = with_ids.has_key_position_ids = true;
  Inputs ids = inputs;
  ids.position_ids = Tensor(DType::kInt64, {2, kQueries, 1, 1});
  ids.key_position_ids = Tensor(DType::kInt64, {2, kKeys, 1, 1});
  for (int64_t b = 0; b < 2; ++b) {
    for (int64_t s = 0; s < kKeys; ++s) {
      ids.key_position_ids->Set(b, s, 0, 0, static_cast<double>(5 + s));
      if (s < kQueries) ids.position_ids->Set(b, s, 0, 0, static_cast<double>(5 + s));
    }
  }
  ExpectSameOutputs(problem, inputs, with_ids, ids);
}

// Scores depend on distances only.
TEST_P(RotaryTest, MovingAllPositionsChangesNoWeight) {
  if (GetParam() == DType::kFloat16 || GetParam() == DType::kBFloat16) return;  // rounds K and Q
  Problem problem = Make();
  problem.rope_theta = 10000;
  problem.has_position_ids = problem.has_key_position_ids = true;
  Inputs inputs = InputsFor(problem);
  const Expected want = Attend(problem, inputs);
  for (Tensor* ids : {&*inputs.position_ids, &*inputs.key_position_ids}) {
    for (int64_t b = 0; b < 2; ++b) {
      for (int64_t s = 0; s < ids->dims()[1]; ++s) ids->Set(b, s, 0, 0, ids->At(b, s, 0, 0) + 77);
    }
  }
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const Outputs got = RunAttention(problem, inputs, target.Options()).value();
    EXPECT_TRUE(AllClose("output", got.output, want.output,
                         {GetParam() == DType::kFloat64 ? 1e-11 : 1e-5, {}}));
  }
}

TEST_P(RotaryTest, ValuesInTheKeysAreNotRotated) {
  Problem problem = Make();
  problem.kv_heads = 1;
  problem.values_in_keys = true;
  problem.rope_theta = 10000;
  problem.rotary_keys = false;
  ExpectConforms(problem, InputsFor(problem));
}

TEST_P(RotaryTest, PresentKeysAreRotatedWithoutQueries) {
  Problem problem = Make();
  problem.query_length = 0;
  problem.past_length = 2;
  problem.wants_present = true;
  problem.rope_theta = 10000;
  ExpectConforms(problem, InputsFor(problem));
}

TEST_P(RotaryTest, AHiddenKeyDoesNotMatterWhateverItIs) {
  Problem problem = Make();
  problem.causal = true;
  problem.rope_theta = 10000;
  const Inputs inputs = InputsFor(problem);
  Inputs poisoned = inputs;
  for (int64_t d = 0; d < problem.head_size; ++d) {
    poisoned.key.Set(0, 0, kQueries, d, std::numeric_limits<double>::quiet_NaN());
  }
  ExpectSameOutputs(problem, inputs, problem, poisoned);
}

// Kernels choose how to compute by the numbers of all rows of a task.
TEST_P(RotaryTest, QueriesThatSeeNoKeyDoNotChangeOthers) {
  Problem dot_product = Make();
  dot_product.key_length = 5;
  dot_product.left_window = 3;
  dot_product.rope_theta = 10000;
  Problem additive = dot_product;
  additive.score_function = ScoreFunction::kAdditive;
  additive.additive_weight = AdditiveWeight{DType::kFloat32, 1};
  for (const Problem& problem : {dot_product, additive}) {
    Problem seeing = problem;
    seeing.query_length = problem.key_length + problem.left_window;
    const Inputs inputs = InputsFor(problem);
    Inputs of_seeing = inputs;
    of_seeing.query = SliceAxis(inputs.query, 2, 0, seeing.query_length);
    for (const Target& target : Targets()) {
      SCOPED_TRACE(target.Name() + " " + ToText(problem));
      const Outputs all = RunAttention(problem, inputs, target.Options()).value();
      const Outputs part = RunAttention(seeing, of_seeing, target.Options()).value();
      const auto rows = [&](const Tensor& tensor) {
        return SliceAxis(tensor, 2, 0, seeing.query_length);
      };
      EXPECT_TRUE(SameBits("output", rows(all.output), part.output));
      EXPECT_TRUE(SameBits("lse", rows(*all.lse), *part.lse));
    }
  }
}

// The pairs are divided, kept and in between.
TEST_P(RotaryTest, ScalesAnglesByDefinition) {
  const RopeScaling llama3{.type = RopeScaling::Type::kLlama3,
                           .factor = 8,
                           .original_length = 32,
                           .slow = 0.5,
                           .fast = 2};
  const RopeScaling yarn{.type = RopeScaling::Type::kYarn,
                         .factor = 4,
                         .original_length = 50,
                         .slow = 0.25,
                         .fast = 4,
                         .attention_factor = 1.1386};
  RopeScaling exact = yarn, one_pair = yarn;
  exact.truncate = false;
  one_pair.original_length = 1;  // the slope ends where it begins
  std::vector<Problem> problems;
  for (const RopeScaling& scaling : {RopeScaling{.factor = 2.5}, llama3, yarn, exact, one_pair}) {
    Problem problem = Make();
    problem.rope_theta = 10000;
    problem.rope_scaling = scaling;
    problems.push_back(problem);
    problem.past_length = 9;
    problem.rotary_embedding_dim = 20;
    problem.query_length = 2;  // keys are rotated when they are read
    problems.push_back(problem);
  }
  for (const Problem& problem : problems) ExpectConforms(problem, InputsFor(problem));
}

// Each chunk of a chunked call has the positions of the whole.
TEST_P(RotaryTest, ChunksHaveThePositionsOfTheWhole) {
  Problem problem = Make();
  problem.past_length = 9;
  problem.causal = true;
  problem.rope_theta = 10000;
  const Inputs inputs = InputsFor(problem);
  const Expected want = Attend(problem, inputs);
  const Tensor keys = JoinRows(inputs.past_key, inputs.key);
  const Tensor values = JoinRows(inputs.past_value, inputs.value);
  for (const Target& target : Targets()) {
    SCOPED_TRACE(target.Name());
    const ChunkedPlan plan =
        MakeChunkedPlan(problem, {Streaming::kQueries, 5, 1}, target.Options()).value();
    for (int64_t n = 0; n < plan.chunks(); ++n) {
      const RowRange rows = plan.Chunk(n);
      const Plan chunk = plan.PlanOf(n);
      Inputs part;
      part.query = SliceAxis(inputs.query, 2, rows.begin, rows.count);
      part.key = keys;
      part.value = values;
      const Outputs got = RunAttention(chunk.problem, part, target.Options()).value();
      std::vector<double> expected;
      for (int64_t head = 0; head < 12; ++head) {
        const auto first = want.output.begin() + (head * kQueries + rows.begin) * 17;
        expected.insert(expected.end(), first, first + rows.count * 17);
      }
      EXPECT_TRUE(AllClose("output", got.output, expected, {ToleranceOf(GetParam()), {}}));
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Types, RotaryTest,
                         ::testing::Values(DType::kFloat32, DType::kFloat16, DType::kBFloat16,
                                           DType::kFloat64),
                         [](const auto& info) { return std::string(NameOf(info.param)); });

// --- Plans and errors ---

Problem Small() {
  return {.batch = 2,
          .query_heads = 2,
          .kv_heads = 1,
          .query_length = 3,
          .key_length = 4,
          .head_size = 6,
          .value_head_size = 6};
}

TEST(RotaryPlanTest, HoldsTheRotatedKeysAndTheAnglesOfTheQueries) {
  Problem problem{.batch = 4,
                  .query_heads = 8,
                  .kv_heads = 8,
                  .query_length = 2048,
                  .key_length = 2048,
                  .head_size = 64,
                  .value_head_size = 64};
  const int64_t without = MakePlan(problem, {}).value().workspace_bytes();
  problem.rope_theta = 10000;
  const int64_t keys = 4 * 8 * 2048 * 64 * 4;
  const int64_t angles = 4 * 2048 * 64 * 4;
  const int64_t rows_of_a_task = 384 * 64 * 4;
  EXPECT_LE(MakePlan(problem, {}).value().workspace_bytes() - without,
            keys + angles + rows_of_a_task + 4096);
  problem.rotary_keys = false;
  EXPECT_LE(MakePlan(problem, {}).value().workspace_bytes() - without,
            angles + rows_of_a_task + 4096);
}

TEST(RotaryPlanTest, HoldsOnlyAnglesIfEachKeyIsReadOnce) {
  Problem problem{.batch = 8,
                  .query_heads = 32,
                  .kv_heads = 32,
                  .query_length = 1,
                  .key_length = 4096,
                  .head_size = 128,
                  .value_head_size = 128};
  const int64_t without = MakePlan(problem, {}).value().workspace_bytes();
  problem.rope_theta = 10000;
  const int64_t angles = (4096 + 8) * 128 * 4;
  const int64_t angles_of_a_task = 64 * 128 * 4;
  EXPECT_LE(MakePlan(problem, {}).value().workspace_bytes() - without,
            angles + angles_of_a_task + 4096);
  problem.wants_present = true;  // has the rotated keys
  EXPECT_GE(MakePlan(problem, {}).value().workspace_bytes() - without, 8 * 32 * 4096 * 128 * 4);
}

std::string ErrorOf(const Problem& problem) {
  const absl::Status status = Validate(problem);
  return std::string(status.message());
}

TEST(RotaryErrorTest, NamesTheFieldAndWhatIsAllowed) {
  Problem odd = Small();
  odd.head_size = 5;
  odd.rope_theta = 1;
  EXPECT_THAT(ErrorOf(odd), HasSubstr("head size of Q is 5; with rotary"));
  Problem dim = Small();
  dim.rope_theta = 1;
  for (const int64_t size : {3, 8}) {
    dim.rotary_embedding_dim = size;
    EXPECT_THAT(ErrorOf(dim), HasSubstr("it must be even and at most 6"));
  }
  dim.rotary_embedding_dim = -2;
  EXPECT_THAT(ErrorOf(dim), HasSubstr("rotary_embedding_dim is -2; it must be 0 (the head size)"));
  for (const double theta : {0.0, -1.0, std::numeric_limits<double>::infinity(),
                             std::numeric_limits<double>::quiet_NaN()}) {
    Problem bad = Small();
    bad.rope_theta = theta;
    EXPECT_THAT(ErrorOf(bad), HasSubstr("rope_theta is ")) << theta;
  }
  Problem both = Small();
  both.rope_theta = 1;
  both.rotary_cache = RotaryCache{.rows = 9, .pairs = 3};
  EXPECT_THAT(ErrorOf(both), HasSubstr("cos_cache and rope_theta are both set"));
  Problem ids = Small();
  ids.has_key_position_ids = true;
  EXPECT_THAT(ErrorOf(ids), HasSubstr("key_position_ids is set, but neither cos_cache nor"));
  ids.rope_theta = 1;
  ids.rotary_keys = false;
  EXPECT_THAT(ErrorOf(ids), HasSubstr("key_position_ids is set, but rotary_keys is false"));
  Problem mla = Small();
  mla.values_in_keys = true;
  mla.rope_theta = 1;
  EXPECT_THAT(ErrorOf(mla), HasSubstr("v_head_size and rope_theta are both set"));
  mla.rotary_keys = false;
  EXPECT_EQ(ErrorOf(mla), "");
}

TEST(RotaryErrorTest, NamesTheCachesAndPositionsThatDoNotFit) {
  Problem problem = Small();
  problem.rotary_cache = RotaryCache{.dtype = DType::kFloat16, .rows = 4, .pairs = 3};
  EXPECT_THAT(ErrorOf(problem), HasSubstr("cos_cache has type FP16; it must be FP32"));
  problem.rotary_cache->dtype = DType::kFloat32;
  EXPECT_EQ(ErrorOf(problem), "");
  problem.rotary_cache->pairs = 2;
  EXPECT_THAT(ErrorOf(problem), HasSubstr("last axis of 2; it must be 3, half of"));
  problem.rotary_cache->pairs = 3;
  problem.rotary_cache->rows = 3;
  EXPECT_THAT(ErrorOf(problem),
              HasSubstr("the position of row 3 of K is 3; it must be from 0 to 2"));
  problem.rotary_keys = false;
  EXPECT_EQ(ErrorOf(problem), "");
  problem.rotary_cache->rows = 2;
  EXPECT_THAT(ErrorOf(problem), HasSubstr("the position of query 2 of batch row 0 is 2"));
  problem.has_position_ids = true;
  EXPECT_EQ(ErrorOf(problem), "");
  problem.rotary_cache->rows = int64_t{1} << 40;
  problem.head_size = int64_t{1} << 40;
  problem.rotary_cache->pairs = problem.head_size / 2;
  EXPECT_NE(ErrorOf(problem), "");
  Problem by_token = Small();
  by_token.rotary_cache = RotaryCache{.batch = 2, .rows = 3, .pairs = 3};
  EXPECT_THAT(ErrorOf(by_token), HasSubstr("K has length 4; the lengths must be equal, or"));
  by_token.rotary_keys = false;
  EXPECT_EQ(ErrorOf(by_token), "");
  by_token.has_position_ids = true;
  EXPECT_THAT(ErrorOf(by_token), HasSubstr("position_ids and cos_cache [B, S, r/2] are both set"));
  by_token.has_position_ids = false;
  by_token.rotary_cache->rows = 2;
  EXPECT_THAT(ErrorOf(by_token),
              HasSubstr("cos_cache is [2, 2, 3]; it must be [M, r/2], or [2, 3"));
}

TEST(RotaryErrorTest, OnnxMovesAQueryOfAShortBatchRowBeforeTheFirstRow) {
  Problem problem = Small();
  problem.has_key_lengths = true;
  problem.rotary_cache = RotaryCache{.rows = 4, .pairs = 3};
  EXPECT_EQ(ErrorOf(problem), "");
  EXPECT_TRUE(ValidateKeyLengths(problem, std::vector<int64_t>{3, 4}).ok());
  EXPECT_TRUE(ValidateKeyLengths(problem, std::vector<int64_t>{3, 2}).ok());
  problem.alignment = Alignment::kOnnx;
  EXPECT_TRUE(ValidateKeyLengths(problem, std::vector<int64_t>{3, 4}).ok());
  EXPECT_THAT(std::string(ValidateKeyLengths(problem, std::vector<int64_t>{3, 2}).message()),
              HasSubstr("the position of query 0 of batch row 1 is -1; it must be from 0 to 3"));
}

TEST(RotaryErrorTest, NamesAnIdBeyondTheCache) {
  Problem problem = Small();
  problem.rotary_cache = RotaryCache{.rows = 4, .pairs = 3};
  problem.has_position_ids = problem.has_key_position_ids = true;
  Rng rng(kSeed);
  Inputs inputs = RandomInputs(problem, rng);
  for (const Target& target : Targets()) {
    ASSERT_TRUE(RunAttention(problem, inputs, target.Options()).ok());
  }
  for (const int64_t position : {int64_t{4}, int64_t{-1}}) {
    inputs.key_position_ids->Set(1, 2, 0, 0, static_cast<double>(position));
    const absl::Status status = RunAttention(problem, inputs, {}).status();
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("key_position_ids[1, 2] is " + std::to_string(position) +
                          "; it must be from 0 to 3, the last row of cos_cache"));
  }
}

TEST(RotaryErrorTest, ChunkedCallsHaveNoIdsAndNoCacheByToken) {
  Problem ids = Small();
  ids.rope_theta = 1;
  ids.has_position_ids = true;
  EXPECT_THAT(std::string(MakeChunkedPlan(ids, {Streaming::kKeys, 1, 1}, {}).status().message()),
              HasSubstr("position_ids is not supported in chunked calls"));
  Problem cache = Small();
  cache.rotary_keys = false;
  cache.rotary_cache = RotaryCache{.batch = 2, .rows = 3, .pairs = 3};
  EXPECT_THAT(std::string(MakeChunkedPlan(cache, {Streaming::kKeys, 1, 1}, {}).status().message()),
              HasSubstr("cos_cache must be [M, r/2] in chunked calls"));
}

// --- Rows ---

// Kernels round as RotateRow() does.
TEST(RotateRowTest, AllInstructionSetsReturnTheSameBits) {
  std::vector<RotateFunction> functions;
  for (const InstructionSet& set : cpu::InstructionSets()) {
    if (set.available) functions.push_back(cpu::Kernels(set.name).rotate);
  }
  Rng rng(kSeed);
  for (const DType type : {DType::kFloat32, DType::kFloat16, DType::kBFloat16}) {
    for (const int64_t pairs : {1, 5, 16, 33, 64}) {
      for (const bool interleaved : {false, true}) {
        const int64_t size = 2 * pairs + 3;
        const Tensor row = Tensor(type, {1, 1, 1, size}).FillUniform(rng, -9, 9);
        const Tensor cos = Tensor(DType::kFloat32, {1, 1, 1, pairs}).FillUniform(rng, -1, 1);
        const Tensor sin = Tensor(DType::kFloat32, {1, 1, 1, pairs}).FillUniform(rng, -1, 1);
        Tensor want(type, {1, 1, 1, size});
        RotaryRow task = {.from = row.View().data,
                          .to = want.MutableView().data,
                          .cos = cos.View().data,
                          .sin = sin.View().data,
                          .pairs = pairs,
                          .size = size,
                          .interleaved = interleaved,
                          .element = ElementOf(type)};
        RotateRow(task);
        for (const RotateFunction rotate : functions) {
          Tensor got(type, {1, 1, 1, size});
          task.from = row.View().data;
          task.to = got.MutableView().data;
          rotate(task);
          EXPECT_TRUE(SameBits("row", got, want));
          Tensor in_place = row;
          task.from = task.to = in_place.MutableView().data;
          rotate(task);
          EXPECT_TRUE(SameBits("row in place", in_place, want));
        }
      }
    }
  }
}

TEST(RotateRowTest, TurnsAPairByItsAngle) {
  // cos and sin of 3-4-5, halves (1, 0 | 0, 1): pair 0 is (1, 0), pair 1 is (0, 1).
  const double cos[] = {0.6, 0.8};
  const double sin[] = {0.8, 0.6};
  double row[] = {1, 0, 0, 1, 7};
  RotaryRow task = {.from = reinterpret_cast<std::byte*>(row),
                    .to = reinterpret_cast<std::byte*>(row),
                    .cos = reinterpret_cast<const std::byte*>(cos),
                    .sin = reinterpret_cast<const std::byte*>(sin),
                    .pairs = 2,
                    .size = 5,
                    .interleaved = false,
                    .element = Element::kFloat64};
  RotateRow(task);
  EXPECT_THAT(row, ::testing::ElementsAre(0.6, -0.6, 0.8, 0.8, 7));
}

}  // namespace
}  // namespace rapt::test
