#include "attention/positions/rotary_embedding.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "tests/support/oracle.h"
#include "tests/support/run_attention.h"
#include "tests/support/run_operator.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kRows = 40;

// The same rotation inside of attention: X is the keys.
Problem KeyProblem(DType dtype) {
  return {.dtype = dtype,
          .batch = 3,
          .query_heads = 4,
          .kv_heads = 4,
          .query_length = 33,
          .key_length = 33,
          .head_size = 12,
          .value_head_size = 12,
          .wants_present = true};
}

RotaryEmbeddingCall CallOf(const Problem& p) {
  RotaryEmbeddingCall call;
  call.inputs[kTokens] = TensorSpec{p.dtype, {p.batch, p.kv_heads, p.key_length, p.head_size}};
  if (p.rotary_cache) {
    const RotaryCache& c = *p.rotary_cache;
    const Shape shape = c.by_position() ? Shape{c.rows, c.pairs} : Shape{*c.batch, c.rows, c.pairs};
    call.inputs[Role::kCosCache] = call.inputs[Role::kSinCache] = TensorSpec{c.dtype, shape};
  }
  if (p.has_key_position_ids) {
    call.inputs[Role::kPositionIds] = TensorSpec{DType::kInt64, {p.batch, p.key_length}};
  }
  call.interleaved = p.interleaved;
  call.rotary_embedding_dim = p.rotary_embedding_dim;
  call.rope_theta = p.rope_theta;
  return call;
}

Arguments ArgumentsOf(const Inputs& inputs, Tensor& y) {
  Arguments arguments;
  arguments.inputs[kTokens] = inputs.key.View();
  if (inputs.cos_cache) arguments.inputs[Role::kCosCache] = inputs.cos_cache->View();
  if (inputs.sin_cache) arguments.inputs[Role::kSinCache] = inputs.sin_cache->View();
  if (inputs.key_position_ids) {
    arguments.inputs[Role::kPositionIds] = inputs.key_position_ids->View();
  }
  arguments.outputs[Role::kY] = y.MutableView();
  return arguments;
}

std::vector<Problem> WithEachRotation(const Problem& problem) {
  std::vector<Problem> problems(4, problem);
  problems[0].rope_theta = 500;
  problems[1].rotary_cache = RotaryCache{.dtype = problem.dtype, .rows = kRows, .pairs = 6};
  problems[1].has_key_position_ids = problems[1].interleaved = true;
  problems[2].rotary_cache = RotaryCache{.batch = 3, .rows = 33, .pairs = 4};
  problems[2].rotary_embedding_dim = 8;
  problems[3].rotary_cache = RotaryCache{.rows = kRows, .pairs = 6};
  return problems;
}

TEST(RotaryEmbeddingTest, RotatesAsAttentionDoesToTheBit) {
  for (const DType dtype : {DType::kFloat32, DType::kFloat16, DType::kBFloat16, DType::kFloat64}) {
    for (const Problem& problem : WithEachRotation(KeyProblem(dtype))) {
      SCOPED_TRACE(ToText(problem));
      Rng rng(3);
      const Inputs inputs = RandomInputs(problem, rng);
      const auto op = MakeRotaryEmbedding(CallOf(problem)).value();
      Tensor y(dtype, inputs.key.dims());
      const Arguments arguments = ArgumentsOf(inputs, y);
      ASSERT_TRUE(op->CheckData(arguments).ok());
      RunOperator(*op, arguments);
      EXPECT_TRUE(SameBits("Y", y, *RunAttention(problem, inputs, {}).value().present_key));
      EXPECT_TRUE(
          AllClose("Y", y, RotatedKeys(problem, inputs).ToVector(), {ToleranceOf(dtype), {}}));
    }
  }
}

TEST(RotaryEmbeddingTest, SplitsHeadsOfARank3Tensor) {
  Problem problem = KeyProblem(DType::kFloat32);
  problem.rope_theta = 100;
  Rng rng(4);
  const Inputs inputs = RandomInputs(problem, rng, {Storage::kBshd, Storage::kBshd});
  RotaryEmbeddingCall call = CallOf(problem);
  call.num_heads = 4;
  call.inputs[kTokens]->shape = {3, 33, 48};
  const auto op = MakeRotaryEmbedding(call).value();
  EXPECT_EQ(op->outputs()[Role::kY]->shape, (Shape{3, 33, 48}));
  Tensor y(problem.dtype, inputs.key.dims(), Storage::kBshd);
  RunOperator(*op, ArgumentsOf(inputs, y));
  EXPECT_TRUE(
      AllClose("Y", y, RotatedKeys(problem, inputs).ToVector(), {ToleranceOf(problem.dtype), {}}));
}

TEST(RotaryEmbeddingTest, NamesWhatIsInvalid) {
  const auto error = [](auto change) {
    Problem problem = KeyProblem(DType::kFloat32);
    problem.rotary_cache = RotaryCache{.rows = kRows, .pairs = 6};
    RotaryEmbeddingCall call = CallOf(problem);
    change(call);
    return std::string(MakeRotaryEmbedding(call).status().message());
  };
  using Call = RotaryEmbeddingCall;
  EXPECT_EQ(error([](Call& c) { c.inputs[kTokens].reset(); }), "X is missing");
  EXPECT_THAT(error([](Call& c) { c.inputs[Role::kSinCache].reset(); }), HasSubstr("both or"));
  EXPECT_THAT(
      error([](Call& c) { c.inputs[Role::kSinCache].reset(), c.inputs[Role::kCosCache].reset(); }),
      HasSubstr("cos_cache is missing; it or rope_theta"));
  EXPECT_THAT(error([](Call& c) { c.rope_theta = 3; }), HasSubstr("are both set"));
  EXPECT_THAT(error([](Call& c) { c.inputs[Role::kSinCache]->shape[0] = 3; }),
              HasSubstr("they must be equal, [M, r / 2] or [B, S, r / 2]"));
  EXPECT_THAT(error([](Call& c) { c.num_heads = 3; }), HasSubstr("num_heads is 3, but X"));
  EXPECT_THAT(error([](Call& c) {
                c.inputs[kTokens]->shape = {3, 33, 48};
              }),
              HasSubstr("num_heads is 0; with X [3, 33, 48] of rank 3"));
  EXPECT_THAT(error([](Call& c) { c.inputs[kTokens]->shape = {48}; }), HasSubstr("X has shape"));
  EXPECT_THAT(error([](Call& c) { c.inputs[kTokens]->shape[3] = 13; }),
              HasSubstr("the head size of X is 13"));
  EXPECT_THAT(error([](Call& c) { c.rotary_embedding_dim = 14; }),
              HasSubstr("rotary_embedding_dim is 14; it must be even and at most 12"));
  EXPECT_THAT(error([](Call& c) { c.inputs[kTokens]->shape[2] = 41; }),
              HasSubstr("the position of row 40 of X is 40; it must be from 0 to 39"));
  EXPECT_THAT(error([](Call& c) {
                c.inputs[Role::kPositionIds] = TensorSpec{DType::kInt64, {3, 32}};
              }),
              HasSubstr("position_ids has shape [3, 32]; it must be [3, 33]"));
  EXPECT_THAT(error([](Call& c) {
                c.inputs[Role::kPositionIds] = TensorSpec{DType::kFloat32, {3, 33}};
              }),
              HasSubstr("position_ids has type FP32; it must be INT64"));
}

TEST(RotaryEmbeddingTest, NamesAnIdBeyondTheCache) {
  Problem problem = KeyProblem(DType::kFloat32);
  problem.rotary_cache = RotaryCache{.rows = kRows, .pairs = 6};
  problem.has_key_position_ids = true;
  Rng rng(5);
  Inputs inputs = RandomInputs(problem, rng);
  inputs.key_position_ids->Set(2, 1, 0, 0, kRows);
  Tensor y(problem.dtype, inputs.key.dims());
  const auto op = MakeRotaryEmbedding(CallOf(problem)).value();
  EXPECT_TRUE(op->checks_data());
  EXPECT_TRUE(op->copied_inputs().contains(Role::kPositionIds));
  EXPECT_THAT(std::string(op->CheckData(ArgumentsOf(inputs, y)).message()),
              HasSubstr("position_ids[2, 1] is 40; it must be from 0 to 39"));
}

}  // namespace
}  // namespace rapt::test
