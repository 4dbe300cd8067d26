// Attention by hashing through the C interface, compared with the operator in C++.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <string>
#include <vector>

#include "attention/mechanism/lsh/lsh_attention.h"
#include "rapt/attention.h"
#include "tests/attention/c/c_plan_test.h"
#include "tests/support/run_operator.h"
#include "tests/support/tensor.h"

namespace rapt::test {
namespace {

using ::testing::HasSubstr;

constexpr int64_t kBatch = 2, kHeads = 3, kLength = 24, kSize = 8, kValueSize = 5, kHashes = 2,
                  kBuckets = 4, kChunk = 6;

rapt_lsh_problem SmallProblem(int32_t form) {
  return {.struct_size = sizeof(rapt_lsh_problem),
          .dtype = RAPT_FP32,
          .form = form,
          .batch = kBatch,
          .heads = kHeads,
          .length = kLength,
          .head_size = kSize,
          .value_head_size = kValueSize,
          .num_hashes = kHashes,
          .num_buckets = form == RAPT_REFORMER ? kBuckets : 0,
          .chunk_length = kChunk,
          .seed = 5,
          .wants_buckets = 1};
}

// The operator's call of that problem.
LshAttentionCall SmallCall(LshForm form) {
  LshAttentionCall call;
  call.form = form;
  call.wants_buckets = true;
  call.num_hashes = kHashes;
  if (form == LshForm::kReformer) call.num_buckets = kBuckets;
  call.chunk_length = kChunk;
  call.seed = 5;
  return call;
}

class CLshTest : public CPlanTest<rapt_lsh_problem, rapt_lsh_arguments> {
 protected:
  CLshTest() : CPlanTest(rapt_lsh_plan_create, rapt_lsh_run) {
    Rng rng(1);
    for (Tensor* tensor : {&query_, &key_, &value_, &rotations_, &simple_rotations_}) {
      tensor->FillUniform(rng, -1, 1);
    }
  }

  rapt_lsh_arguments AllArguments(bool is_simple = false) {
    return {.struct_size = sizeof(rapt_lsh_arguments),
            .query = query_.View().data,
            .key = key_.View().data,
            .value = value_.View().data,
            .rotations = RotationsOf(is_simple).View().data,
            .key_lengths = lengths_,
            .output = output_.MutableView().data,
            .buckets = buckets_.data()};
  }

  // Computes the problem, and the operator's call with the tensors that it takes.
  void ExpectEqual(const rapt_lsh_problem& problem, LshAttentionCall call) {
    const auto add = [&](Role role, const Tensor& tensor, const Shape& shape,
                         Arguments& arguments) {
      call.inputs[role] = TensorSpec{DType::kFloat32, shape};
      arguments.inputs[role] = tensor.View();
    };
    Arguments arguments;
    const Shape keys = {kBatch, kHeads, kLength, kSize};
    add(Role::kQ, query_, keys, arguments);
    const bool is_simple = call.form == LshForm::kSimple;
    if (is_simple) add(Role::kK, key_, keys, arguments);
    add(Role::kV, value_, {kBatch, kHeads, kLength, kValueSize}, arguments);
    if (problem.rotations_dtype != 0) {
      call.seed.reset();
      const Tensor& rotations = RotationsOf(is_simple);
      add(kLshRotations, rotations,
          {problem.has_head_rotations != 0 ? kHeads : 1, kSize, kHashes, rotations.dims()[3]},
          arguments);
    }
    if (problem.has_key_lengths != 0) {
      call.inputs[Role::kKeyLengths] = TensorSpec{DType::kInt64, {kBatch}};
      arguments.key_lengths = lengths_;
    }
    Tensor want(DType::kFloat32, {kBatch, kHeads, kLength, kValueSize});
    std::vector<int32_t> buckets(buckets_.size());
    buckets_ = buckets;  // with fewer hashes only the first ones are written
    arguments.outputs[Role::kY] = want.MutableView();
    arguments.outputs[kLshBuckets].data = reinterpret_cast<std::byte*>(buckets.data());
    RunOperator(*MakeLshAttention(call).value(), arguments, {.threads = 2});

    ASSERT_EQ(Create(problem), RAPT_OK) << message_;
    ASSERT_EQ(Run(AllArguments(is_simple)), RAPT_OK) << message_;
    EXPECT_TRUE(SameBits("output", output_, want));
    EXPECT_EQ(buckets_, buckets);
  }

  // The rotations of a form.
  const Tensor& RotationsOf(bool is_simple) const {
    return is_simple ? simple_rotations_ : rotations_;
  }

  Tensor query_{DType::kFloat32, {kBatch, kHeads, kLength, kSize}};
  Tensor key_{DType::kFloat32, {kBatch, kHeads, kLength, kSize}};
  Tensor value_{DType::kFloat32, {kBatch, kHeads, kLength, kValueSize}};
  Tensor rotations_{DType::kFloat32, {kHeads, kSize, kHashes, kBuckets / 2}};
  Tensor simple_rotations_{DType::kFloat32, {kHeads, kSize, kHashes, kSize}};
  int64_t lengths_[kBatch] = {kLength, 19};
  Tensor output_{DType::kFloat32, {kBatch, kHeads, kLength, kValueSize}};
  std::vector<int32_t> buckets_ = std::vector<int32_t>(kBatch * kHeads * kHashes * kLength);
};

TEST_F(CLshTest, ComputesBothForms) {
  ExpectEqual(SmallProblem(RAPT_REFORMER), SmallCall(LshForm::kReformer));
  ExpectEqual(SmallProblem(RAPT_SIMPLE), SmallCall(LshForm::kSimple));
}

TEST_F(CLshTest, TakesRotationsOfTheSimpleForm) {
  rapt_lsh_problem problem = SmallProblem(RAPT_SIMPLE);
  problem.rotations_dtype = RAPT_FP32;
  problem.has_head_rotations = 1;
  ExpectEqual(problem, SmallCall(LshForm::kSimple));
}

TEST_F(CLshTest, ReadsEveryAttribute) {
  struct {
    void (*change)(rapt_lsh_problem&);
    void (*expect)(LshAttentionCall&);
  } const kCases[] = {
      {[](rapt_lsh_problem& p) { p.scale = 0.7; }, [](LshAttentionCall& c) { c.scale = 0.7; }},
      {[](rapt_lsh_problem& p) { p.num_hashes = 0; },
       [](LshAttentionCall& c) { c.num_hashes = 1; }},
      {[](rapt_lsh_problem& p) { p.num_buckets = 0; },
       [](LshAttentionCall& c) { c.num_buckets = 0; }},
      {[](rapt_lsh_problem& p) { p.chunk_length = 8; },
       [](LshAttentionCall& c) { c.chunk_length = 8; }},
      {[](rapt_lsh_problem& p) { p.has_chunks_before = 1; },
       [](LshAttentionCall& c) { c.chunks_before = 0; }},
      {[](rapt_lsh_problem& p) { p.chunks_after = 1; },
       [](LshAttentionCall& c) { c.chunks_after = 1; }},
      {[](rapt_lsh_problem& p) { p.seed = 0; }, [](LshAttentionCall& c) { c.seed = 0; }},
      {[](rapt_lsh_problem& p) { p.causal = 1; }, [](LshAttentionCall& c) { c.is_causal = true; }},
      {[](rapt_lsh_problem& p) { p.has_key_lengths = 1; }, [](LshAttentionCall&) {}},
      {[](rapt_lsh_problem& p) { p.rotations_dtype = RAPT_FP32; }, [](LshAttentionCall&) {}},
      {[](rapt_lsh_problem& p) { p.rotations_dtype = RAPT_FP32, p.has_head_rotations = 1; },
       [](LshAttentionCall&) {}},
  };
  for (const auto& [change, expect] : kCases) {
    rapt_lsh_problem problem = SmallProblem(RAPT_REFORMER);
    LshAttentionCall call = SmallCall(LshForm::kReformer);
    change(problem);
    expect(call);
    ExpectEqual(problem, call);
  }
}

TEST_F(CLshTest, NamesTheInvalidField) {
  struct {
    const char* message;
    void (*change)(rapt_lsh_problem&);
  } const kCases[] = {
      {"dtype is 5; it must be from 1 to 4", [](rapt_lsh_problem& p) { p.dtype = RAPT_BOOL; }},
      {"form is 2; it must be from 0 to 1", [](rapt_lsh_problem& p) { p.form = 2; }},
      {"batch is -1", [](rapt_lsh_problem& p) { p.batch = -1; }},
      {"heads is 65537", [](rapt_lsh_problem& p) { p.heads = 65537; }},
      {"length is -1", [](rapt_lsh_problem& p) { p.length = -1; }},
      {"head_size is 0", [](rapt_lsh_problem& p) { p.head_size = 0; }},
      {"value_head_size is 0", [](rapt_lsh_problem& p) { p.value_head_size = 0; }},
      {"rotations_dtype is 5", [](rapt_lsh_problem& p) { p.rotations_dtype = RAPT_BOOL; }},
      {"num_hashes is 1025; it must be from 0 to 1024",
       [](rapt_lsh_problem& p) { p.num_hashes = 1025; }},
      {"num_buckets is 0; it must be from 2",
       [](rapt_lsh_problem& p) { p.rotations_dtype = RAPT_FP32, p.num_buckets = 0; }},
      {"num_buckets is 3; it must be even", [](rapt_lsh_problem& p) { p.num_buckets = 3; }},
      {"chunk_length is 7; it must divide the length 24",
       [](rapt_lsh_problem& p) { p.chunk_length = 7; }},
      {"chunks_before is -1",
       [](rapt_lsh_problem& p) { p.has_chunks_before = 1, p.chunks_before = -1; }},
      {"chunks_after is -1", [](rapt_lsh_problem& p) { p.chunks_after = -1; }},
      {"scale is", [](rapt_lsh_problem& p) { p.scale = INFINITY; }},
      {"is_causal is true; form 'simple' hides only padding",
       [](rapt_lsh_problem& p) { p.form = RAPT_SIMPLE, p.num_buckets = 0, p.causal = 1; }},
  };
  for (const auto& c : kCases) {
    rapt_lsh_problem problem = SmallProblem(RAPT_REFORMER);
    c.change(problem);
    EXPECT_THAT(ErrorOf(problem), HasSubstr(c.message));
  }
}

TEST_F(CLshTest, NamesTheMissingTensor) {
  rapt_lsh_problem problem = SmallProblem(RAPT_SIMPLE);
  problem.has_key_lengths = 1;
  problem.rotations_dtype = RAPT_FP32;
  ASSERT_EQ(Create(problem), RAPT_OK) << message_;
  struct {
    const char* message;
    void (*change)(rapt_lsh_arguments&);
  } const kCases[] = {
      {"query is null", [](rapt_lsh_arguments& a) { a.query = nullptr; }},
      {"key is null", [](rapt_lsh_arguments& a) { a.key = nullptr; }},
      {"value is null", [](rapt_lsh_arguments& a) { a.value = nullptr; }},
      {"rotations is null", [](rapt_lsh_arguments& a) { a.rotations = nullptr; }},
      {"key_lengths is null", [](rapt_lsh_arguments& a) { a.key_lengths = nullptr; }},
      {"output is null", [](rapt_lsh_arguments& a) { a.output = nullptr; }},
      {"buckets is null", [](rapt_lsh_arguments& a) { a.buckets = nullptr; }},
  };
  for (const auto& c : kCases) {
    rapt_lsh_arguments arguments = AllArguments();
    c.change(arguments);
    EXPECT_EQ(Run(arguments), RAPT_INVALID_ARGUMENT);
    EXPECT_STREQ(message_, c.message);
  }
}

TEST_F(CLshTest, NamesALengthThatIsOutOfRange) {
  rapt_lsh_problem problem = SmallProblem(RAPT_REFORMER);
  problem.has_key_lengths = 1;
  ASSERT_EQ(Create(problem), RAPT_OK) << message_;
  lengths_[1] = 25;
  EXPECT_EQ(Run(AllArguments()), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "nonpad_kv_seqlen[1] is 25; it must be from 0 to the length 24");
}

TEST_F(CLshTest, APlanIsRunByItsOwnFunction) {
  ASSERT_EQ(Create(SmallProblem(RAPT_REFORMER)), RAPT_OK) << message_;
  EXPECT_EQ(ErrorOfAttention(), "plan is of attention by hashing; rapt_lsh_run runs it");
  const rapt_linear_arguments arguments = {.struct_size = sizeof(arguments)};
  EXPECT_EQ(rapt_linear_run(context_, plan_, &arguments, nullptr, 0, message_, sizeof(message_)),
            RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "plan is of attention by hashing; rapt_lsh_run runs it");
  CreateOfAttention();
  EXPECT_EQ(Run(AllArguments()), RAPT_INVALID_ARGUMENT);
  EXPECT_STREQ(message_, "plan is of attention; rapt_run runs it");
}

}  // namespace
}  // namespace rapt::test
